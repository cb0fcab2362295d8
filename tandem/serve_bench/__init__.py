"""Load on a served model, and what its clients see: `tandem bench serve`."""
