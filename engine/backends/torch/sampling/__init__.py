"""Sampling and scoring of the logits of a batch."""
