"""vLLM's."""
