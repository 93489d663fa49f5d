"""Parts of the two transports over UCX, `nixl` and `ucxx`: agents, links, and permitted lanes."""
