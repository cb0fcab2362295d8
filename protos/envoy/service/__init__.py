"""Package of Envoy's names."""
