"""vllm.grpc.engine: the part of VllmEngine that Tandem's router answers."""
