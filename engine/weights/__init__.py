"""Weights read from a live worker of the same model, so that a start need not wait for a disk."""
