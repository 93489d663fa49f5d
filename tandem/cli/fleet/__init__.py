"""Commands that serve by stock servers."""
