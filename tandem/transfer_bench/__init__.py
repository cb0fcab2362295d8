"""How fast blocks move through a connector, next to what its medium gives by itself in the same run.

    choice, options   what a person typed ─▶ the medium
    measure           rounds: raw, digests off, digests on, in turns; compares every byte
    ├─ media          what a connector is told, its raw ceilings, what it leaves to clear away:
    │                 file_media, server_media (with private_redis), nixl_medium
    ├─ raw            the ceilings
    ├─ holder         the process that lends
    └─ half           KV memory and a connector without an engine: lends, or loads
    report, check     the table and the JSON file of `tandem bench transfer`; the findings of `tandem doctor`

`tandem bench transfer` and `tandem doctor` are its callers; docs/bench_transfer.md says what is compared with what.
"""
