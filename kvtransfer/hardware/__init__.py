"""NICs and GPUs of this host, and which NICs serve a GPU."""
