"""The suite for real clusters, `make test-kubernetes`: its settings, its plan, and the tools that its tests use."""
