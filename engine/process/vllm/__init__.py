"""Programs that run vLLM: the engine process, and those of its ranks and nodes."""
