"""Streams from the router to decode workers, one per worker for all its requests."""
