"""Who may reach what of a router: keys and what they allow (`api_keys.py`), the settings (`config.py`), the check
before each call of gRPC (`guard.py`; HTTP's is `router/frontend/openai/guard.py`)."""
