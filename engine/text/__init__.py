"""Text: tokenizer, chat template, incremental detokenizer, stop strings. Free of torch."""
