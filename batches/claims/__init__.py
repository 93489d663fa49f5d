"""Claims: which of several processes runs a batch."""
