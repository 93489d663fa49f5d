"""Stock servers as workers: `vllm serve` as it is, and other servers with OpenAI's API, behind this router."""
