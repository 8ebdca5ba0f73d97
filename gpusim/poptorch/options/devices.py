"""Options of the IPUs: their number, ids and memory, and when to attach."""

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
    """The IPUs that run the model."""

    _execution_strategy: _IExecutionStrategy

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Round the number of IPUs up to the next power of two."""
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setExecutionStrategy(self, strategy: _IExecutionStrategy) -> Self:
        """Set how blocks are placed on IPUs. AssertionError for other types."""
        assert isinstance(strategy, _IExecutionStrategy)
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> Self:
        """Set the share of memory that convolutions and products may use, by IPU: `{"IPU0": 0.5}`.

        AssertionError for a key that does not begin with IPU, ValueError if no number follows.
        """
        by_ipu = {}
        for key, share in available_memory_proportion.items():
            assert isinstance(key, str) and key.startswith("IPU"), MEMORY % key
            by_ipu[int(key.removeprefix("IPU"))] = share
        self.set(available_memory_proportion=by_ipu)
        return self

    def useIpuModel(self, use_model: bool) -> Self:
        """Choose whether to run on the IPU Model; overrides POPTORCH_IPU_MODEL."""
        self.createOrSet(use_model=use_model)
        return self

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Set when to attach to the IPUs. AssertionError for other types."""
        assert isinstance(connection_type, ConnectionType)
        self.set(connection_type=connection_type.value)
        return self

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Set which IPUs wait for each other. AssertionError for other types."""
        assert isinstance(sync_pattern, SyncPattern)
        self.set(sync_pattern=sync_pattern.value)
        return self

    def useIpuId(self, ipu_id: int) -> Self:
        """Attach to the device with this id in `gc-info -l`. AssertionError for other types."""
        assert isinstance(ipu_id, int)
        self._set_device(ipu_id)
        return self

    def _set_device(self, ipu_id: int) -> None:
        self.createOrSet(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile for IPUs of this generation, without attaching to one."""
        self.connectionType(ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)
        return self
