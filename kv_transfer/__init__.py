"""How KV blocks get from one instance to another: leases (control), connectors (data), the page format."""
