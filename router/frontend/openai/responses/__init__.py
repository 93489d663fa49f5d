"""The Responses API: bodies, answers, and stored conversations."""
