"""Lessons from receipts: speeds, lengths of outputs, and the quality of predictions."""
