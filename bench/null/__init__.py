"""`make bench-null`: Tandem beside `vllm serve`, over an executor that computes nothing: what a token costs."""
