"""A Kubernetes API server for tests, on loopback: what Helm, kubectl and the Python client need of it, and no more.

    HTTP ──server──▶ faults ──▶ rights ──▶ store ──watch log──▶ controllers: Deployments → ReplicaSets → Pods,
                                             ▲                   EndpointSlices, tokens, what an owner leaves behind
                                             └──────────────────────┴── kubelet: which pods run and are ready

It is as strict as the real one where a chart or a client may be wrong: fields that do not exist, rights that nobody
gave, objects that somebody else has changed, two writers of one field. `FakeKube` in cluster.py is the way in, and
`ProcessKube` in process_kube.py where each container is to be a process of this machine.
"""
