"""Access to a router: API keys and checks of gRPC calls (`api_keys.py`), settings (`config.py`).

The check for HTTP is `router/frontend/http/server.py`.
"""
