"""Grammars of structured output, and their check in a process that may die of it."""
