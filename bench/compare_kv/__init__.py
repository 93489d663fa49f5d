"""Cases in which KV goes wrong, on two stock vLLM servers with either connector, and on Tandem's workers."""
