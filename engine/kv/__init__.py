"""KV blocks: the block pool, the KV cache manager, block keys, and the tiers below the pool."""
