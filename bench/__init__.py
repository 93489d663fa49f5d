"""Benchmarks. Each ends with a table of bars and writes the same as JSON under .bench/."""
