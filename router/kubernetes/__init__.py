"""The router in a Kubernetes cluster: who is in its pools, and how they get other sizes.

    cluster.py    one client of the API server: the pod's own account, bounded tries, errors for people
    objects.py    what of Kubernetes' objects is read, as values
    endpoints.py  Membership by the EndpointSlices of a Service
    actuator.py   Actuator on the scale subresource
    election.py   who leads, by a Lease
    link.py       all of it for one router; imports the package `kubernetes`, so it is imported only where it is used

Everything stays within one namespace and needs the rights that docs/kubernetes.md lists, no more.
"""
