"""envoy.service.ext_proc.v3: what an Envoy asks of an endpoint picker."""
