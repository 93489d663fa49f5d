"""Benchmarks. Each ends with a table of bars and writes the same as JSON under .bench/."""

import os

# uvloop starts processes by fork, and gRPC's handlers of a fork lose a start now and then. gRPC reads this when it is
# imported, so it is set before any benchmark imports anything.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
