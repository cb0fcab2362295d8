"""How big each pool is to be: observe, decide, resize."""
