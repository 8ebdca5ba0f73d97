"""Options.Distributed: the number of this process and of all, from Open MPI's variables."""

from __future__ import annotations

import os
from typing import Any, Self

from gpusim.poptorch.options.base import OptionsDict

__all__ = ["_DistributedOptions"]


class _DistributedOptions(OptionsDict):
    """Reached as `Options().Distributed`; under poprun, `popdist.poptorch.Options` sets them.

    Executors of several processes are one, with the replicas of all; a DataLoader gives each its
    part of the data.
    """

    def __init__(self) -> None:
        self._gcd_mappings: dict[int, Any] = {}
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self._from_variables("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> Self:
        """One process of one, whatever the environment says."""
        self.set(num_distributed_processes=1, distributed_process_id=0)
        return self

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> Self:
        """Read both numbers from these variables, with the defaults 1 and 0.

        ValueError if one holds no number.
        """
        return self._from_variables(var_num_processes, var_process_id)

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """Set the number of this process and of all.

        AssertionError for other types than int, ValueError for a process number out of range.
        """
        return self._set_process(process_id, num_processes)

    @property
    def processId(self) -> int:
        """Which process this is, from 0."""
        return int(self.distributed_process_id)

    @property
    def numProcesses(self) -> int:
        """The number of processes."""
        return int(self.num_distributed_processes)

    # popdist.poptorch blocks the methods above and sets the numbers by these

    def _from_variables(self, var_num_processes: str, var_process_id: str) -> Self:
        return self._set_process(number(var_process_id, 0), number(var_num_processes, 1))

    def _set_process(self, process_id: int, num_processes: int) -> Self:
        numbers = isinstance(process_id, int) and isinstance(num_processes, int)
        if numbers and not 0 <= process_id < num_processes:
            raise ValueError(
                f"process_id={process_id}: expected one of 0 to {num_processes - 1}, as "
                f"num_processes={num_processes}"
            )
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self


def number(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip()
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"{variable}={text!r}: expected a whole number") from None
