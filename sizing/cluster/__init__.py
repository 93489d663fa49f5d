"""The cluster in virtual time: routers, workers, links, store, and the planner that sizes it."""
