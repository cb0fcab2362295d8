"""An instance of either role: settings, the server around an engine core, conversions, transfers, load, metrics."""
