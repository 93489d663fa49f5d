"""User programs of Tandem: the CLI, the Python client, the launchers, the load generator and the doctor."""
