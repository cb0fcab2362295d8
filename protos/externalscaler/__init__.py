"""externalscaler: what KEDA asks of an external scaler."""
