"""Everything through which a worker is reached: its gRPC services, membership, and connections of routers."""
