"""The prefill role: lends KV blocks and computes those it lacks."""
