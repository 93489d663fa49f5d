"""An engine over several tensor-parallel ranks: messages from rank 0 to its followers, and their processes."""
