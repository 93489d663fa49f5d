"""C++ that is compiled once per machine, and the loop over bytes that needs it."""
