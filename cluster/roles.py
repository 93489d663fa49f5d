"""Names of the worker roles."""

from typing import Literal

from protos import membership_pb2 as pb

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")
ON_WIRE: dict[Role, "pb.Role.ValueType"] = {"prefill": pb.ROLE_PREFILL, "decode": pb.ROLE_DECODE}
