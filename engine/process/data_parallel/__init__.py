"""Data-parallel groups: the steps that several engine processes make together."""
