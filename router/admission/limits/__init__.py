"""Limits of tenants: rates, concurrency, quotas, and shares of one resource."""
