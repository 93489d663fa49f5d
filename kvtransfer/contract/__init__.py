"""Tests that every transport passes, for transports of this repository and of other packages."""
