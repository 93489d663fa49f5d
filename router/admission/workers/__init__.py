"""Which workers and lenders may take a request: capacity, load, reservations and failures."""
