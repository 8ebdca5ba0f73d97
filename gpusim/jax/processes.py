"""Programs over several processes of `jax.distributed`, which gpusim's collectives refuse.

The devices of a collective meet in one process. Without this check each process would wait for the
others' until the time-out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

Groups = Sequence[Sequence[int]]


def refuse_processes(context: Any, groups: Groups, text: str) -> None:
    """Refuse to lower a collective some of whose groups are in several processes.

    **Arguments**: `context` is JAX's axis context of the module; `groups` number its devices;
    `text` names the collective.

    **Raises**: NotImplementedError, which names the number of processes.
    """
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        refuse_devices(mesh.devices.flat, text, groups)
    elif mesh is not None and jax.distributed.is_initialized():
        # An abstract mesh: which devices it has is known when the program is compiled.
        if mesh.size > jax.local_device_count():
            _refuse(jax.process_count(), mesh.size, text)


def refuse_devices(devices: Iterable[Any], text: str, groups: Groups | None = None) -> None:
    """Refuse groups of a program's devices of which some are in several processes.

    Without `groups` all devices are one. Groups that are in one process each may meet there.
    """
    processes = [device.process_index for device in devices]
    if groups is None:
        groups = [range(len(processes))]
    if any(len({processes[member] for member in group}) > 1 for group in groups):
        _refuse(len(set(processes)), len(processes), text)


def _refuse(processes: int, devices: int, text: str) -> None:
    raise NotImplementedError(
        f"gpusim.jax: {text} is on the devices of {processes} processes (jax.distributed), and "
        "gpusim's collectives run in one. Simulate all devices in one process, by "
        f"`gpusim jaxrun --devices {devices} SCRIPT` without jax.distributed.initialize; or call "
        "gpusim.jax.uninstall(), or leave the axis out of install's dict"
    )
