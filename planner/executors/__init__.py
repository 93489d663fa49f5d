"""Executors, which carry out the planner's desired sizes."""
