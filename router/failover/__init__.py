"""What happens when an instance fails under a request. The way in is safeguards.py; docs/failover.md says why."""
