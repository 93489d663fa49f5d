"""The Responses API: bodies, answers, stored conversations, and counts of tokens."""
