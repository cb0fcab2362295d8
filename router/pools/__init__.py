"""Who is in the two pools, how loaded, and whether each may be picked. The way in is pool.py; docs/membership.md."""
