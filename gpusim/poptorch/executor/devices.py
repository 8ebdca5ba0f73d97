"""The executor's IPUs: their number, their device, and attaching to it."""

from __future__ import annotations

from gpusim.devices import (
    AcquireError,
    Connection,
    ConnectionType,
    Device,
    DeviceError,
    IpuCountError,
    Table,
    reserved,
)
from gpusim.poptorch._logging import logger
from gpusim.poptorch.hardware import usesIpuModel
from gpusim.poptorch.options import Options
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["MOST_IPUS", "Ipus", "candidates", "ipus_per_replica"]

MOST_IPUS = 64
TOO_MANY = (
    "Too many IPUs requested ({}). Experiments that need more than 64 IPUs require distributed "
    "execution."
)
WHY = ", because PopTorch must reserve a power of 2 or a multiple of 64 IPUs."
NO_POWER = (
    "The model specifies the use of {} IPUs, however PopTorch must reserve a minimum of {} in "
    "order to allow the model to run{} Please reconfigure your model to use a different number of "
    "IPUs or set poptorch.Options().autoRoundNumIPUs(True)."
)
ROUNDED = "Reserving %d IPUs when the model specifices the use of only %d%s %d will be reserved "
ROUNDED += "but not used."
TOO_SMALL = (
    "Expected at least replication factor * used IPUs = {} * {} = {} device Ids but the user "
    "provided {}"
)
TOO_LARGE = (
    "Expected replication factor * used IPUs = %d * %d = %d device Ids but the device selected has "
    "%d IPUs which means some of them will not be used."
)


def ipus_per_replica(options: Options, highest: int = 0) -> int:
    """The number of IPUs of a replica: one more than the highest number that a block names.

    **Arguments**

    - `highest`: that number; 0 for a model without blocks. popdist's options may ask for more.
    """
    return max(highest + 1, getattr(options, "_ipus_per_replica", 1))


def candidates(options: Options, per_replica: int, table: Table | None = None) -> list[Device]:
    """The devices that fit the options.

    **Raises**:

    - poptorch.Error: for more than 64 IPUs, for a number other than a power of two without
      `autoRoundNumIPUs`, for a device that is too small or does not exist, and for too few IPUs.
    """
    replicas = options.replication_factor
    needed = replicas * per_replica
    if needed > MOST_IPUS:
        raise createPoptorchError(TOO_MANY.format(needed))
    table = table or Table.from_environment()
    chosen = device_of(options)
    if chosen is not None:
        return [of_id(table, chosen, replicas, per_replica)]
    size = reserved(needed)
    if size != needed:
        if not options.auto_round_num_ipus:
            raise createPoptorchError(NO_POWER.format(needed, size, WHY))
        logger.warning(ROUNDED, size, needed, WHY, size - needed)
    found = list(table.of_size(size))
    if not found:
        raise createPoptorchError(
            f"Failed to acquire {size} IPU(s): there are {table.count} simulated IPUs "
            "(GPUSIM_IPUS says how many)"
        )
    return found


def device_of(options: Options) -> int | None:
    """The id of the device that was asked for; under poprun, of the instance's own."""
    if "globalReplicationFactor" in options._Popart.options:
        try:
            return int(options.toDict()["ipu_id"])
        except IpuCountError as error:
            raise createPoptorchError(str(error)) from None
    return options.ipu_id if options.exists("ipu_id") else None


def of_id(table: Table, chosen: int, replicas: int, per_replica: int) -> Device:
    try:
        device = table.device(chosen)
    except DeviceError as error:
        raise createPoptorchError(f"Failed to acquire device Id {chosen}: {error}") from None
    needed = replicas * per_replica
    if len(device) < needed:
        raise createPoptorchError(TOO_SMALL.format(per_replica, replicas, needed, len(device)))
    if len(device) > needed:
        logger.warning(TOO_LARGE, per_replica, replicas, needed, len(device))
    return device


class Ipus:
    """An executor's connection to its IPUs: real ones are exclusive, an IPU Model is its own.

    **Arguments**

    - `options`: which device, when to attach, and whether it is the IPU Model.
    - `per_replica`: the number of IPUs of a replica.

    poptorch.Error as `candidates`, and if the device is in use when it is attached to.
    """

    def __init__(self, options: Options, per_replica: int = 1) -> None:
        self._model = usesIpuModel(options)
        self._type = ConnectionType(options.connection_type)
        if self._model and self._type is ConnectionType.Never:
            raise createPoptorchError(
                "ConnectionType.Never / poptorch.Options.useOfflineIpuTarget not supported for the "
                "IPU model"
            )
        self._attached = False
        self._id = -1  # of the device that it was attached to last
        self._connection: Connection | None = None
        if self._model or self._type is ConnectionType.Never:
            if options.replication_factor * per_replica > MOST_IPUS:
                raise createPoptorchError(TOO_MANY.format(options.replication_factor * per_replica))
            return
        found = candidates(options, per_replica)
        self._first = found[0]
        self._connection = Connection(found, ConnectionType.OnDemand, log=logger)

    @property
    def model(self) -> bool:
        """Whether this is the IPU Model."""
        return self._model

    @property
    def immediate(self) -> bool:
        """Whether to attach as soon as a model is compiled."""
        return self._type is ConnectionType.Always

    @property
    def attached(self) -> bool:
        return self._connection.attached if self._connection is not None else self._attached

    def acquire(self) -> None:
        """Choose the device: ConnectionType.Always attaches to it, OnDemand does so later.

        poptorch.Error if the device is in use.
        """
        if self.immediate:
            self.attach()
        elif self._connection is not None:
            log_acquired(self._first)

    def attach(self) -> None:
        """Attach. poptorch.Error if the device is in use."""
        if self._connection is None:
            self._attached = True
            return
        try:
            device = self._connection.attach()
        except AcquireError as error:
            raise createPoptorchError(str(error)) from None
        if self.immediate and self._id < 0:
            log_acquired(device)
        self._id = device.id
        logger.debug("Attached to device %d", device.id)

    def detach(self) -> None:
        """Release the device if it is attached."""
        if self._connection is not None and self._connection.attached:
            self._connection.detach()
            logger.debug("Detached from device %d", self._id)
        self._attached = False


def log_acquired(device: Device) -> None:
    logger.debug("Acquired %d IPU(s): running on device Id %d.", len(device), device.id)
