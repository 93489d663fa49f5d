"""`make bench-fleet`: the router over stock `vllm serve` servers, whose executor computes nothing."""
