"""What the router takes on: budgets, a fair queue, refusals. The way in is door.py; docs/admission.md says why."""
