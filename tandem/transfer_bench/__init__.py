"""How fast blocks move through a connector, next to what its medium gives by itself in the same run.

    measure      rounds: raw, digests off, digests on, in turns; verifies every byte
    ├─ media     what a connector is told, its raw ceilings, what it leaves to clear away
    │  └─ raw, private_redis
    ├─ holder    the process that lends
    └─ half      KV memory and a connector without an engine: lends, or loads
    report       the table and the JSON file

`tandem bench transfer` and `tandem doctor` are its callers.
"""
