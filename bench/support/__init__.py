"""Shared parts of benchmarks: workers, namespaces, reports."""
