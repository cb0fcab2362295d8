"""Sampling: parameters, changes to logits, the draw of a token, log-probabilities."""
