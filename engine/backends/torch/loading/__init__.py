"""Loading of models: checkpoints, adapters, quantised layers and the shards of ranks."""
