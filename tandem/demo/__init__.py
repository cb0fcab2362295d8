"""The demo model: a Qwen3 of four million parameters that knows a village, its animals and their tandems.

It lives in the repository so that a fresh machine shows real text within seconds and so that tests have a model whose
logits mean something: greedy output varies, end-of-sequence is reached. tools/demo_model writes its training text and
trains it.
"""

from pathlib import Path

MODEL_DIR: Path = Path(__file__).parent / "model"
"""A folder as the Hugging Face hub lays it out: config, weights, tokenizer with chat template, generation defaults."""
