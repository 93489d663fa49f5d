"""An engine of several tensor-parallel ranks: what a step says to those that follow rank 0."""
