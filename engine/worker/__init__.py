"""The process around an engine that both worker roles share."""
