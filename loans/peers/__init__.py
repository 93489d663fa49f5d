"""The network between engine processes: one connection over TLS for each pair of engines, driven by the engine's loop."""
