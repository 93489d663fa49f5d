"""The router's side of files and batches: their settings, the link to `python -m batches`, and that process's life.

What crosses, and who owns what, is in `batches/__init__.py`.
"""
