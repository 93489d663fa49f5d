"""Access to a router: API keys (`api_keys.py`), settings (`config.py`), checks of gRPC calls (`guard.py`).

The check for HTTP is `router/frontend/http/server/guard.py`.
"""
