"""Moves spans of bytes between the KV pools of two processes. Knows no request and no model."""
