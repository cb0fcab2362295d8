"""The router in a Kubernetes cluster: discovery of its pools, and their resizing.

    cluster.py    the client of the API server, and the values read of its objects
    discovery.py  ServiceDiscovery by the EndpointSlices of a Service
    actuator.py   Actuator on the scale subresource, leader election by a Lease, and the link that the router owns;
                  imports the package `kubernetes`, so it is imported only where it is used

Everything stays within one namespace and needs only the rights that docs/kubernetes/security.md lists.
"""
