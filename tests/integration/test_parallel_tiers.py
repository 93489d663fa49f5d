"""Engines of two ranks with tiers below their pools and a shared store."""
