"""Inputs of a decision as they were, in memory and as JSON."""
