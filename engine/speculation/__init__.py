"""Speculative decoding: draft tokens, verified in the same step.

Pure; the runner verifies.
"""
