"""Messages between a front and its engine process.

Plain data, batched per step. Most are named tuples, which are made and pickled several times as fast as dataclasses.
"""
