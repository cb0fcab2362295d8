"""The decode role: generates tokens from KV that a prefill instance or this instance computed."""
