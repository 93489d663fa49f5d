"""The HTTP server: connections, keys, and pages of other origins."""
