"""Scheduling: which requests compute how many tokens in a step, and their KV blocks."""
