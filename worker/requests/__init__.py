"""Requests that routers place on a worker: the engine's messages in, the client's messages out."""
