"""Torch engine: a transformers model over paged KV.

The only package that imports torch.
"""
