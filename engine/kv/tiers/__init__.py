"""KV blocks that the pool evicted, kept under their names in host memory and on disk."""
