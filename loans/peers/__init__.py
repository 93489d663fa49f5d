"""The network between engine processes: one connection for each pair, driven by the engine's loop."""
