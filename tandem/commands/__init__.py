"""One module per command of `tandem`; each has a `command`. None of them imports torch or transformers at the top."""
