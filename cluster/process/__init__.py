"""Life of a process: readiness, drain, its event loop and its memory."""
