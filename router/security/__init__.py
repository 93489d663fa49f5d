"""Access to a router: API keys (`api_keys.py`), settings (`config.py`), and the check before each gRPC call (`guard.py`).

The check for HTTP is `router/frontend/openai/guard.py`.
"""
