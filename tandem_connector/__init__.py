"""KV connector that gives a stock `vllm serve` Tandem's loans."""
