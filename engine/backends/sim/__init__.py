"""The sim backend: real scheduler, pool and transfers; each token is a hash of the KV bytes read."""
