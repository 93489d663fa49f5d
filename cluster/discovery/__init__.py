"""Discovery of routers by the processes that join them."""
