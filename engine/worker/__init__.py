"""The front of a worker, common to both roles: membership, loan streams, metrics, drain and role switch."""
