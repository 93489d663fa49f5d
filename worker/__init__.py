"""A worker of either role: its runtime, requests, membership, metrics, drain and role switch."""
