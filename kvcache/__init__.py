"""KV blocks: pools, what an engine keeps about their named blocks, pins, and the stores below."""
