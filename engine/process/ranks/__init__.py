"""Ranks of an engine in other processes, on this host or on other nodes."""
