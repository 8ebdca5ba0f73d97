"""The device of a session: its number of IPUs, how to attach to them, and its replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpusim.devices import Connection, ConnectionType, reserved
from gpusim.errors import GpusimError

from .execution import Instances, Machine
from .utils import check_device, hardware

if TYPE_CHECKING:
    from .ir import Ir

__all__ = ["SessionDevice", "acquire", "ipus_per_replica"]


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
    """A device with the IPUs that an Ir needs in this instance, rounded up to a power of two.

    The device is the one that popdist names for this instance, or the first free one.
    """
    check_device(kind, 1)
    replicas = ir.instance_replication_factor
    ipus = reserved(replicas * ipus_per_replica(ir))
    check_device(kind, ipus)
    if kind != "ipu_hw":
        return SessionDevice(ir, kind, ipus, None)
    devices = hardware(ipus, replicas if ir._replication is None else None)
    return SessionDevice(ir, kind, ipus, Connection(devices, ConnectionType.OnDemand))
