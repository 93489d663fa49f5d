"""Files, batches and logs of answers on disk."""
