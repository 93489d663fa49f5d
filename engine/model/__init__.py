"""Facts about a model directory that need no torch: files, tokenizer and quantization."""
