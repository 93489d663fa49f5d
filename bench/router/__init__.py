"""`make bench-router`: how good the router's decisions are and what they cost."""
