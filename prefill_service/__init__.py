"""The prefill role: computes prompts and offers their KV to decode instances."""
