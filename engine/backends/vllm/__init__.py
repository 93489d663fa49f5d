"""vLLM under Tandem's loans: an engine program that runs vLLM's own EngineCore, in vLLM's own environment."""
