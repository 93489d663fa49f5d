"""`make bench-router`: quality and cost of the router's decisions."""
