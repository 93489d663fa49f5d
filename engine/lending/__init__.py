"""Both sides of the Lend handshake as pure state machines: events in, actions out."""
