"""Who takes part in a measurement: gpusim, the memory limit, NumPy, JAX, PyTorch and MPI.

`roster` makes them; libraries load when a peer gets its first case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .base import Peer, Unserved

__all__ = ["FAMILIES", "OURS", "Peer", "Unserved", "roster"]

OURS = "gpusim"


def _gpusim() -> list[Peer]:
    from .ours import Collectives, Memcpy, Nearest, Pmap, Segments, Vmap
    from .remote import NumPyKernels

    ways = [Vmap(), Collectives(), Pmap(), Nearest(), Segments(), Memcpy()]
    return [*ways, NumPyKernels("gpusim, NumPy kernels")]


def _limit() -> list[Peer]:
    from .arithmetic import Arithmetic
    from .limit import Limit

    return [Limit(), Arithmetic()]


def _numpy() -> list[Peer]:
    from .numpy import NumPy

    return [NumPy()]


def _jax() -> list[Peer]:
    from .remote import JaxWorker

    return [JaxWorker("JAX shard_map"), JaxWorker("JAX vmap"), JaxWorker("gpusim in JAX")]


def _torch() -> list[Peer]:
    from .remote import Worker

    return [Worker("LocalTensor")]


def _mpi() -> list[Peer]:
    from .remote import MpiWorkers

    return [MpiWorkers("MPI 2", 2), MpiWorkers("MPI 8", 8)]


FAMILIES: dict[str, Callable[[], list[Peer]]] = {
    "limit": _limit,
    "numpy": _numpy,
    "jax": _jax,
    "torch": _torch,
    "mpi": _mpi,
}


def roster(families: Iterable[str] = tuple(FAMILIES)) -> list[Peer]:
    """gpusim and the peers of these families."""
    peers = _gpusim()
    for family in families:
        peers += FAMILIES[family]()
    return peers
