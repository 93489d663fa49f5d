"""How processes find and trust each other: membership, RPC, errors, logs."""
