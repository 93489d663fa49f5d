"""`make bench-tiers`: KV that outlives and outgrows a worker."""
