"""The version of what the processes of one cluster say to each other."""

PROTOCOL = 2
"""Raised with every change of the internal protocols, or of what their fields mean, that a process of before would
misunderstand. Routers take only workers that have theirs, and pair only workers that they took."""
