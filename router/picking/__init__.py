"""Where a request runs: filter, score, pick, and whether it is split. The way in is plan.py.

docs/picking.md and docs/disaggregation.md say why.
"""
