"""TensorFlow under PopDist: the process and the device of this instance, in an IPUConfig."""

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
    """Set the process and the device of this instance, and return the config.

    **Arguments**

    - `config`: any object with the attributes of an IPUConfig that are set:
      `experimental.multi_replica_distribution.process_index` and `.process_count`, and
      `select_ipus`.
    - `ipus_per_replica`: deprecated; must equal the number in the environment.
    - `configure_device`: whether to select this instance's device.

    **Raises**: ValueError if `ipus_per_replica` contradicts the environment, and the errors of
    `popdist.getDeviceId` and `popdist.getInstanceIndex`.
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
