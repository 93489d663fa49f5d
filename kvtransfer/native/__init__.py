"""C++ code compiled once per machine: the compiler wrapper, the fingerprint loop and the cross-memory copy."""
