"""Shared parts of benchmarks: workers, servers, reports."""
