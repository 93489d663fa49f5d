"""Sources of stock servers: addresses, names, files and Kubernetes, each followed while the router runs."""
