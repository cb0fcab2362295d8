"""A Kubernetes API server for tests, on loopback: what Helm, kubectl and the Python client need of it, and no more.

    HTTP ──server──▶ faults ──▶ rights ──▶ store ──watch log──▶ controllers: Deployments → ReplicaSets → Pods,
                                             ▲                   EndpointSlices, tokens, what an owner leaves behind
                                             └──────────────────────┴── kubelet: which pods run and are ready

It is as strict as the real one where a chart or a client may be wrong: fields that do not exist, names that are none,
selectors that miss their pods, elements that are there twice, deadlines, rights that were not given, objects that have
changed meanwhile, two writers of one field (by /scale as well). It knows nothing of nodes and what fits on them, of
admission (quotas, Pod Security, webhooks), network policies, custom resources' schemas, or fields that a client leaves
to defaults other than those it reads. `FakeKube` in cluster.py is the way in, and
`ProcessKube` in process_kube.py where each container is to be a process of this machine.
"""
