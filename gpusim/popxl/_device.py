"""The device of a session: how many IPUs it takes, attaching to them, and its replicas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpusim.devices import (
    Connection,
    ConnectionType,
    Table,
    reserved,
    select_by_count,
)
from gpusim.errors import GpusimError
from gpusim.runtime.world import World, current_world

from .execution import Machine

if TYPE_CHECKING:
    from .ir import Ir

__all__ = ["Device", "acquire", "ipus_per_replica"]

TYPES = ("ipu_hw", "ipu_model", "cpu")


class Device:
    """A number of IPUs: simulated ones that are attached to, or as many as one likes."""

    def __init__(self, ir: Ir, kind: str, ipus: int, connection: Connection | None) -> None:
        self.ir, self.kind, self.ipus = ir, kind, ipus
        self._connection = connection
        self._attached = False
        self._world: World | None = None
        if ir.replication_factor != ir.instance_replication_factor:
            self._world = current_world() or World.from_environment()

    @property
    def attached(self) -> bool:
        """Whether it is this session's now."""
        return self._attached

    def attach(self) -> None:
        """Take it; RuntimeError if another has it."""
        if self._connection is not None:
            try:
                self._connection.attach()
            except GpusimError as error:
                assert self._connection.device is not None
                raise RuntimeError(
                    f"Could not attach to device {self._connection.device.id}. Check `gc-monitor` "
                    f"for device usage. {error}"
                ) from error
        self._attached = True

    def detach(self) -> None:
        """Let others have it."""
        if self._connection is not None:
            self._connection.detach()
        self._attached = False

    def machine(self) -> Machine:
        """What runs the replicas of this instance."""
        ir, options = self.ir, self.ir.getSessionOptions()
        offset = 0 if self._world is None else self._world.replica_offset
        machine = Machine(
            ir.instance_replication_factor,
            offset=offset,
            total=ir.replication_factor,
            arrays=options.arrays,
        )
        machine.one_by_one = bool(options.oneByOne)
        machine.world = self._world
        return machine

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which the instances exchange values; an error in it ends all of them."""
        if self._world is None or current_world() is not None:
            yield
            return
        with self._world:
            yield


def ipus_per_replica(ir: Ir) -> int:
    """The highest IPU that an op has been placed on, plus one."""
    placed = (op.ipu for graph in ir._graphs.values() for op in graph._ops)
    return 1 + max((ipu for ipu in placed if ipu is not None), default=0)


def acquire(ir: Ir, kind: str) -> Device:
    """A device with the IPUs that an Ir needs in this instance, rounded up to a power of two."""
    if kind not in TYPES:
        raise ValueError(
            f"Incorrect device type provided: {kind}, must be one of: `ipu_hw`, `ipu_model`, `cpu`"
        )
    ipus = reserved(ir.instance_replication_factor * ipus_per_replica(ir))
    if kind == "cpu" and ipus > 1:
        raise ValueError(
            f"For a cpu device, multiple devices (provided: {ipus}) are not supported."
        )
    connection = hardware(ir, ipus) if kind == "ipu_hw" else None
    return Device(ir, kind, ipus, connection)


def hardware(ir: Ir, ipus: int) -> Connection:
    """Simulated IPUs: those that popdist names for this instance, else the first so many free."""
    try:
        if ir._replication is None:
            from gpusim import popdist

            table = Table.from_environment()
            chosen = table.device(popdist.getDeviceId(ipus // ir.instance_replication_factor))
            return Connection(chosen, ConnectionType.OnDemand)
        found = select_by_count(ipus)
    except GpusimError as error:
        raise RuntimeError(
            f"Failed to acquire device with {ipus} IPUs. Ensure that there are sufficient IPUs "
            "available. If you have enabled the Poplar SDK you can check device availability with "
            f"the `gc-monitor` command-line utility. {error}"
        ) from error
    return Connection(found, ConnectionType.OnDemand)
