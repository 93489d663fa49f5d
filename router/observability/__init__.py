"""Metrics, traces, placement decisions and samples that the router keeps for people."""
