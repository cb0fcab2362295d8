"""The instances of both pools: discovery, health, load. Start at pool.py; see docs/membership.md."""
