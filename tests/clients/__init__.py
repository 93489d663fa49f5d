"""Public clients and load tools against a cluster of the demo model: which feature of which client works."""
