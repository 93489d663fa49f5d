"""The KV pool of the torch engine: its size, its rows, and the bytes and fingerprints of its blocks."""
