"""Everybody of one local stack: who there is to be (roster.py), what each is told (topology.py), and the processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from engine.machine import available_bytes
from serving.lifetime import ParentBond
from tandem.machine import free_ports
from tandem.member import Member, MemberSpec
from tandem.roster import Role, Roster, Seat, SizeRefused
from tandem.stack_settings import StackSettings
from tandem.topology import Topology

ROUTER = "router"
_INSIDE = "127.0.0.1"
"""Where instances and the admin listener are: on this machine alone, whatever the clients' address is."""


class Crew:
    """Made with a router and the first instances, none of them started. But for `resize`, used from one thread."""

    def __init__(
        self, settings: StackSettings, folder: Path, bond: ParentBond, env: Mapping[str, Mapping[str, str]]
    ) -> None:
        """`env` is laid over the environment of the member of that name, "*" over everybody's."""
        self._settings = settings
        self._bond = bond
        self._env = env
        self._topology = Topology(settings, folder)
        self.members: dict[str, Member] = {}
        """Everybody whose process runs or is to run again, those that leave included."""
        names: list[tuple[str, Role]] = [(f"prefill-{index}", "prefill") for index in range(settings.num_prefill)]
        names += [(f"decode-{index}", "decode") for index in range(settings.num_decode)]
        router_port, admin_port, http_port, *ports = free_ports(len(names) + 3, settings.host)
        self.admin_address = f"{_INSIDE}:{admin_port}"
        """Where the router answers operators."""
        self.http_address = None if settings.http_port is None else f"{settings.host}:{settings.http_port or http_port}"
        """Where the router speaks OpenAI's HTTP API; None: nowhere."""
        address = f"{settings.host}:{settings.port or router_port}"
        self._add(self._topology.router(address, self.admin_address, self.http_address))
        seats = [Seat(name, role, f"{_INSIDE}:{port}") for (name, role), port in zip(names, ports, strict=True)]
        for seat in seats:
            self.add(seat)
        self.roster = Roster(seats, self._free_address, needs_prefill=settings.disaggregation == "always")

    @property
    def stack_address(self) -> str:
        """Where the routers expect the owner of the stack: unix:PATH."""
        return self._topology.stack_address

    def add(self, seat: Seat) -> Member:
        """Makes the member for a seat, with the KV memory of every other one, and cores of its own if some are free."""
        return self._add(self._topology.instance(seat.name, seat.address))

    def start(self, member: Member) -> None:
        """Starts its process, for the first time or again."""
        member.start(self._bond)

    def remove(self, member: Member) -> None:
        """Its process is gone: so are its files, and its name, its address and its cores are free."""
        del self.members[member.name]
        member.remove_files()
        self._topology.release(member.name)
        self.roster.vacate(member.name)

    def resize(self, role: Role, size: int, victims: Sequence[str] = ()) -> int:
        """As Roster.resize; raises SizeRefused as well when there is no memory for so many."""
        self.roster.check(role, size)
        growth = size - len(self.roster.seating.pool(role))
        needed_bytes, free_bytes = growth * (self._topology.kv_cache_bytes or 0), available_bytes()
        if needed_bytes > free_bytes:
            raise SizeRefused(
                f"{growth} more {role} instances need {needed_bytes / 2**30:.1f} GiB for KV alone, and "
                f"{free_bytes / 2**30:.1f} GiB are free; `tandem up --kv-memory` makes each one's part smaller"
            )
        return self.roster.resize(role, size, victims)

    def _add(self, spec: MemberSpec) -> Member:
        env = {**spec.env, **self._env.get(spec.name, {}), **self._env.get("*", {})}
        member = self.members[spec.name] = Member(spec.with_env(env))
        return member

    def _free_address(self, taken: Collection[str]) -> str:
        """host:port for a newcomer: nobody listens there, and none of those will that are about to."""
        taken = {*taken, self.members[ROUTER].spec.address}
        addresses = (f"{_INSIDE}:{port}" for port in free_ports(len(taken) + 1, _INSIDE))
        return next(address for address in addresses if address not in taken)
