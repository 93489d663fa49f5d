"""The HTTP server: connections, keys, and CORS."""
