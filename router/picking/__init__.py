"""Where a request runs: filter, score, pick, and whether it is split. Start at plan.py.

docs/picking.md and docs/disaggregation.md say why.
"""
