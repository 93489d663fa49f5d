"""Prompts in a model's tokens: chat templates and tokenisation."""
