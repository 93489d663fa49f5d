"""Shared foundations of every process: configuration, membership, RPC, errors, logs."""
