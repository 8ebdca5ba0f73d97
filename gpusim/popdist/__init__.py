"""PopDist: the replicas and the device of this instance, and calls that several instances share.

`popdist.popart` and `popdist.tensorflow` configure those frameworks. Without poprun's variables
there is one instance with one replica, and everything works.
"""

from __future__ import annotations

from . import popart, tensorflow
from .backend import init, isBackendInitialized
from .device_id import getDeviceId
from .participants import execute_on_instances, registerCommunicator, synchronize
from .replicas import (
    checkNumIpusPerReplica,
    getInstanceIndex,
    getLocalInstanceIndex,
    getNumInstances,
    getNumIpusPerReplica,
    getNumLocalReplicas,
    getNumTotalReplicas,
    getReplicaIndexOffset,
    isPopdistEnvSet,
    isUniformReplicasPerInstance,
)

__all__ = [
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "isUniformReplicasPerInstance",
    "popart",
    "registerCommunicator",
    "synchronize",
    "tensorflow",
]
