"""The CPU path: kernels compiled once for this machine, and the modules of a model that use them."""
