"""Everything through which a worker is reached: its gRPC services, membership, and streams to routers and lenders."""
