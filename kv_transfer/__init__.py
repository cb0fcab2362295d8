"""How KV blocks get from one instance to another. Imports point down:

multi_connector    several connectors as one
stores | nixl      connectors: through a store, or out of the other instance's memory
transfer           leases, producer and loader, attach stream between instances, what connectors share
page               the page format with its checks, names of pages, KV memory as bytes
secret             the key of the digests
"""
