"""Tiers below the pool: blocks that the pool evicted, kept under their keys in host memory and on disk."""
