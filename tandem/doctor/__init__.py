"""Checks of this host before any request: what is installed and allowed, and whether each pair of workers moves KV."""
