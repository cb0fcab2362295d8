"""The protos of package `tandem`, with their Python stubs; import `protos.tandem.v1.<file>_pb2`."""
