"""vLLM's KV memory and block pool, as Tandem's loans use them."""
