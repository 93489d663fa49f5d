"""Loads of a cluster and their results: traces, profiles, requests and what became of them.

`tandem bench` and `tandem compare` send them to live clusters, `sizing` to simulated ones, so both are measured alike.
"""
