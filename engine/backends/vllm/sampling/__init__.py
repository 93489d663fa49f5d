"""Sampling by vLLM or by Tandem, and the verification of draft tokens."""
