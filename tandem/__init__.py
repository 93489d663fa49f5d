"""What a person runs: the CLI, the client, the launchers."""
