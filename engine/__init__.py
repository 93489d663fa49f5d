"""Inference engine: block pool, prefix cache, scheduler, lending, and the backends that compute."""
