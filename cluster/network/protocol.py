"""Version of the internal protocols between the processes of one cluster."""

PROTOCOL = 4
"""Version number, raised with every change that an older process would misunderstand. Routers accept only workers with
their own version, and pair only workers that they accepted."""

DECODE_FRAMES = 16
"""Frames of a router's stream to a worker (`frame_stream.py`) with a RouterFrame there, or a DecodeFrame back."""
WORKER_EVENTS = 17
"""Frames of the same stream with a WorkerMessage to the router."""
