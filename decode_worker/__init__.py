"""The decode role: borrows the prompt's KV blocks, samples every token, streams text."""
