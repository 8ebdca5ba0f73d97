"""PopTorch's options under PopDist: replicas, process and device are this instance's."""

from __future__ import annotations

from typing import Any, NoReturn

from gpusim.popdist.device_id import getDeviceId
from gpusim.popdist.replicas import (
    checkNumIpusPerReplica,
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
)
from gpusim.poptorch import options as poptorch
from gpusim.runtime import environment

__all__ = ["Options"]


class Options(poptorch.Options):
    """`poptorch.Options` with what poprun has decided, which can no longer be set.

    `replication_factor` is the number of this instance's own replicas, `Distributed.processId`
    the instance and `Distributed.numProcesses` how many there are. `toDict` names the device.
    `useIpuId`, `replicationFactor` and the methods of `Distributed` are a RuntimeError.

    **Arguments**

    - `ipus_per_replica`: how many IPUs a replica has; None is what the environment says.

    ValueError if that is not what the environment says; GpusimError (a RuntimeError) if instances
    hold different numbers of replicas.

    >>> options = Options()
    >>> options.replication_factor, options.Distributed.processId
    (1, 0)
    >>> options.useIpuId(0)
    Traceback (most recent call last):
    ...
    RuntimeError: Cannot call `useIpuId` with popdist.poptorch.Options
    """

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        told = environment.popdist().ipus_per_replica is not None
        if ipus_per_replica is not None and told and not checkNumIpusPerReplica(ipus_per_replica):
            raise ValueError(
                f"ipus_per_replica={ipus_per_replica}: expected {getNumIpusPerReplica()}, as the "
                "environment says (poprun --ipus-per-replica)"
            )
        self._ipus_per_replica = ipus_per_replica or getNumIpusPerReplica()
        super().__init__()
        self._set_replicas(getNumLocalReplicas())
        self._distributed = _DistributedOptions()
        self._popart.set("enableDistributedReplicatedGraphs", True)
        self._popart.set("globalReplicationFactor", getNumTotalReplicas())
        self._popart.set("globalReplicaOffset", getReplicaIndexOffset())

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """RuntimeError: the instance has its own device."""
        blocked("useIpuId")

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """RuntimeError: `poprun --num-replicas` says it."""
        blocked("replicationFactor")

    def toDict(self) -> dict[str, Any]:
        """As for PopTorch's, and the device's id.

        What `popdist.getDeviceId` raises if the host has too few IPUs.
        """
        return {**super().toDict(), "ipu_id": getDeviceId(self._ipus_per_replica)}


class _DistributedOptions(poptorch._DistributedOptions):
    """Which instance this is; setting it is a RuntimeError."""

    def __init__(self) -> None:
        super().__init__()
        self._set_process(getInstanceIndex(), getNumInstances())

    def disable(self) -> NoReturn:
        """RuntimeError: poprun says it."""
        blocked("Distributed.disable")

    def setEnvVarNames(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RuntimeError: poprun says it."""
        blocked("Distributed.setEnvVarNames")

    def configureProcessId(self, *args: Any, **kwargs: Any) -> NoReturn:
        """RuntimeError: poprun says it."""
        blocked("Distributed.configureProcessId")


def blocked(method: str) -> NoReturn:
    raise RuntimeError(f"Cannot call `{method}` with popdist.poptorch.Options")
