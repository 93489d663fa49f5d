"""Shapes of models: layers, weights, and the KV of a sequence."""
