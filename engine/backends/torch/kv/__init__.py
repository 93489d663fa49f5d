"""The KV pool: its size, and the bytes and fingerprints of blocks, also of those in vLLM's memory."""
