"""TensorFlow under PopDist: which process of how many, and which device, in an IPUConfig."""

from __future__ import annotations

from typing import Any

from gpusim.popdist.device_id import getDeviceId
from gpusim.popdist.replicas import (
    checkNumIpusPerReplica,
    getInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
)

__all__ = ["set_ipu_config"]


def set_ipu_config(
    config: Any, ipus_per_replica: int | None = None, configure_device: bool = True
) -> Any:
    """Set what TensorFlow needs to know about this instance, and return the config.

    **Arguments**

    - `config`: any object with the attributes of an IPUConfig that are set:
      `experimental.multi_replica_distribution.process_index` and `.process_count`, and
      `select_ipus`.
    - `ipus_per_replica`: deprecated; must be what the environment says.
    - `configure_device`: whether to select this instance's device.

    ValueError if `ipus_per_replica` is not what the environment says, and what
    `popdist.getDeviceId` and `popdist.getInstanceIndex` raise.
    """
    if ipus_per_replica is not None and not checkNumIpusPerReplica(ipus_per_replica):
        raise ValueError(
            f"ipus_per_replica={ipus_per_replica}: expected {getNumIpusPerReplica()}, as the "
            "environment says (poprun --ipus-per-replica)"
        )
    distribution = config.experimental.multi_replica_distribution
    distribution.process_count = getNumInstances()
    distribution.process_index = getInstanceIndex()
    if configure_device:
        config.select_ipus = getDeviceId()
    return config
