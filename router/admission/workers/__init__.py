"""Workers and lenders that may take a request: capacity, load, reservations and failures."""
