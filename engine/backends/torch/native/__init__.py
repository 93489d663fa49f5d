"""CPU kernels, compiled once for this machine, and the model modules that use them."""
