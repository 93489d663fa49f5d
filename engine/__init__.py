"""What computes: block pool, prefix cache, scheduler, lending, and the engines themselves."""
