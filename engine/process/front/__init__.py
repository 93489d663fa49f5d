"""The front's side of an engine process: starts it, talks to it and ends it."""
