"""Speculative decoding: guesses at the tokens that follow, verified in one step. Pure; the runner verifies."""
