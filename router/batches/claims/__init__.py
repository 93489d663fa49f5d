"""Claims: which of several routers runs a batch."""
