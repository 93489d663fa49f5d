"""Reads of a loan's blocks, and their verification."""
