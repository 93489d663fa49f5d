"""Connections between processes: gRPC, frames over TCP, HTTP, Redis, TLS."""
