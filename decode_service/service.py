"""The decode role: serves what every instance serves (instance/decoding.py). Its defaults suit many streams."""

from __future__ import annotations

from instance import decoding
from instance.role import Role
from protos.tandem.v1 import instance_pb2

ROLE = Role("decode", instance_pb2.ROLE_DECODE, decoding.SERVICE)
