"""Engine backends: `torch` computes a transformers model, `sim` models compute time."""
