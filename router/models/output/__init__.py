"""A model's output: reasoning, tool calls, and texts of tokens."""
