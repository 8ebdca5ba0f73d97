"""Options of the IPUs: which ones, how many, when to attach, and how they share memory and time."""

from __future__ import annotations

from typing import Any, Self

from gpusim.poptorch.enums import ConnectionType, SyncPattern
from gpusim.poptorch.options.base import OptionsDict
from gpusim.poptorch.options.strategies import _IExecutionStrategy

__all__ = ["DEFAULTS", "DeviceOptions"]

DEFAULTS: dict[str, Any] = {
    "auto_round_num_ipus": False,
    "connection_type": ConnectionType.Always.value,
    "sync_pattern": SyncPattern.Full.value,
    "available_memory_proportion": {},
}
MEMORY = (
    'Available memory proportions are expected to be in a dictionary of {"IPU0": 0.5} where the '
    "0 in IPU is the index of the IPU. Invalid key: %s"
)


class DeviceOptions(OptionsDict):
    """Which IPUs run the model."""

    _execution_strategy: _IExecutionStrategy

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Reserve the next power of two where the model needs a number that is none."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setExecutionStrategy(self, strategy: _IExecutionStrategy) -> Self:
        """How blocks are spread over IPUs. AssertionError for what is no strategy."""
        assert isinstance(strategy, _IExecutionStrategy)
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """How much memory convolutions and products may use, by IPU: `{"IPU0": 0.5}`.

        AssertionError for a key that does not begin with IPU, ValueError if no number follows.
        """
        by_ipu = {}
        for key, share in available_memory_proportion.items():
            assert isinstance(key, str) and key.startswith("IPU"), MEMORY % key
            by_ipu[int(key.removeprefix("IPU"))] = share
        self.set(available_memory_proportion=by_ipu)
        return self

    def useIpuModel(self, use_model: bool) -> Self:
        """Whether to run on the IPU Model; counts more than POPTORCH_IPU_MODEL."""
        self.createOrSet(use_model=use_model)
        return self

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """When to attach to the IPUs. AssertionError for what is no ConnectionType."""
        assert isinstance(connection_type, ConnectionType)
        self.set(connection_type=connection_type.value)
        return self

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Which IPUs wait for each other. AssertionError for what is no SyncPattern."""
        assert isinstance(sync_pattern, SyncPattern)
        self.set(sync_pattern=sync_pattern.value)
        return self

    def useIpuId(self, ipu_id: int) -> Self:
        """Which device to attach to, by its id in `gc-info -l`. AssertionError for no int."""
        assert isinstance(ipu_id, int)
        self._set_device(ipu_id)
        return self

    def _set_device(self, ipu_id: int) -> None:
        self.createOrSet(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile for IPUs of this generation and never attach to one."""
        self.connectionType(ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)
        return self
