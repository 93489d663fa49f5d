"""The preprocessor: makes pictures, sounds and videos ready for models, in child processes that may die of a file.

router ──Process──▶ service.py ──▶ fetching.py (URLs) ──▶ children.py ══pipe══▶ child.py (decodes, no network)
worker ──Fetch────▶ service.py ──▶ blobs.py (tensors by identifier)
"""
