"""A client of vLLM's gRPC made of the published stubs (smg-grpc-proto), as a process of its own.

Their messages and ours bear the same names, which one process can hold only once. Usage: smg_client.py COMMAND ADDRESS
[JSON of the request]; answers with one JSON line for each message, an error as {"code", "details"}.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import grpc
from google.protobuf import json_format

# The stubs were generated with a newer grpcio than LMCache's pins allow here. They refuse to load under an older one,
# but use nothing that it lacks.
grpc.__version__ = "1.81.1"
from smg_grpc_proto import vllm_engine_pb2 as vllm  # noqa: E402
from smg_grpc_proto import vllm_engine_pb2_grpc  # noqa: E402


def shape() -> dict[str, dict[str, list[Any]]]:
    """Every message's fields by name: number, type, label, oneof."""
    return {
        message.name: {
            field.name: [
                field.number,
                field.type,
                field.is_repeated,
                field.containing_oneof.name if field.containing_oneof else None,
            ]
            for field in message.fields
        }
        for message in vllm.DESCRIPTOR.message_types_by_name.values()
    }


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "shape":
        print(json.dumps(shape()))
        return
    address, told = arguments
    method = vllm.DESCRIPTOR.services_by_name["VllmEngine"].methods_by_name[command]
    request = json_format.ParseDict(json.loads(told), getattr(vllm, method.input_type.name)())
    with grpc.insecure_channel(address) as channel:
        answer = getattr(vllm_engine_pb2_grpc.VllmEngineStub(channel), command)(request, timeout=20)
        try:
            for message in answer if method.server_streaming else [answer]:
                print(json.dumps(json_format.MessageToDict(message, preserving_proto_field_name=True)))
        except grpc.RpcError as error:
            print(json.dumps({"code": error.code().name, "details": error.details()}))


if __name__ == "__main__":
    main()
