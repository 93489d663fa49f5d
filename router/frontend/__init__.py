"""Frontends of the router: the gRPC service, the OpenAI-compatible HTTP API and the console."""
