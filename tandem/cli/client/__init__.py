"""Commands that call a router."""
