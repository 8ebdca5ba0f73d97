"""The device of a session: its number of IPUs, how to attach to them, and its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusim import popdist
from gpusim.devices import (
    Connection,
    ConnectionType,
    Table,
    reserved,
    select_by_count,
)
from gpusim.errors import GpusimError

from .execution import Instances, Machine

if TYPE_CHECKING:
    from .ir import Ir

__all__ = ["SessionDevice", "acquire", "ipus_per_replica"]

TYPES = ("ipu_hw", "ipu_model", "cpu")


class SessionDevice:
    """A number of IPUs: simulated ones to attach to, or any number without a connection."""

    def __init__(self, ir: Ir, kind: str, ipus: int, connection: Connection | None) -> None:
        self.ir, self.kind, self.ipus = ir, kind, ipus
        self._connection = connection
        self._attached = False
        self.instances = Instances.connect(ir.instance_replication_factor, ir.replication_factor)

    @property
    def attached(self) -> bool:
        """Whether this session holds the device."""
        return self._attached

    def attach(self) -> None:
        """Take the device; RuntimeError if another session holds it."""
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
        """Release the device."""
        if self._connection is not None:
            self._connection.detach()
        self._attached = False

    def machine(self) -> Machine:
        """The machine that runs the replicas of this instance."""
        options = self.ir.getSessionOptions()
        return Machine(self.instances, options.arrays, bool(options.oneByOne))


def ipus_per_replica(ir: Ir) -> int:
    """The highest IPU with an op, plus one."""
    return 1 + max((op.ipu for graph in ir._graphs.values() for op in graph._ops), default=0)


def acquire(ir: Ir, kind: str) -> SessionDevice:
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
    return SessionDevice(ir, kind, ipus, connection)


def hardware(ir: Ir, ipus: int) -> Connection:
    """Simulated IPUs: those that popdist names for this instance, else the first free ones."""
    try:
        if ir._replication is None:
            table = Table.from_environment()
            chosen = table.device(popdist.getDeviceId(ipus // ir.instance_replication_factor))
            return Connection(chosen, ConnectionType.OnDemand)
        device = select_by_count(ipus)
    except GpusimError as error:
        raise RuntimeError(
            f"Failed to acquire device with {ipus} IPUs. Ensure that there are sufficient IPUs "
            "available. If you have enabled the Poplar SDK you can check device availability with "
            f"the `gc-monitor` command-line utility. {error}"
        ) from error
    return Connection(device, ConnectionType.OnDemand)
