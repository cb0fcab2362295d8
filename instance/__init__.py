"""What prefill and decode instances share: settings, the front around an engine core, conversions, text and load."""
