"""The twins: the fold of each engine's all-reduce, and how it was checked.

Plain data; `gpusim twin check` compares it with the engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpusim.fallback.schedules import (
    Balanced,
    Binary,
    Case,
    Exact,
    Fold,
    Loops,
    Schedule,
    Segments,
    Tree,
    Walk,
)

from .wires import Wire

__all__ = ["HALVES", "SETTINGS", "TWINS", "Twin", "nccl_ring"]

KI = 1 << 10
MI = 1 << 20

ENGINE = "run against the engine"
DOCUMENTED = "from documentation, not checked on hardware"
#: The types that MPI adds; other ones are added in the same order, by the contract.
MPI_FORMATS = ("float32", "float64", "complex64", "complex128")
HALVES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Twin:
    """A named Reduction that reproduces an engine's all-reduce.

    **Attributes**:

    - `name`: the argument of `Reduction.like`; without `fields` also a `Reduction.order`.
    - `engine`: the engine that it reproduces, with the version of the check.
    - `fold`: its fold, in words.
    - `schedule`: its order, for kernels.
    - `checked`: how the equality was checked.
    - `dtypes`: the floating-point and complex types that were compared.
    - `worker`: the engine that `gpusim twin check` runs, or "".
    - `settings`: the settings of that engine.
    - `fields`: the other fields of its Reduction.
    """

    name: str
    engine: str
    fold: str
    schedule: Schedule
    checked: str = ENGINE
    dtypes: tuple[str, ...] = MPI_FORMATS
    worker: str = ""
    settings: tuple[tuple[str, int], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()


def _always(
    fold: Fold, *, hops: str = "default", from_zero: bool = False, formats: tuple[str, ...] = ()
) -> Schedule:
    return Schedule((Case(fold),), hops, from_zero, formats)


LINEAR, REVERSE, RING = Walk(), Walk(start=-1, step=-1), Walk(cut=Balanced())
DOUBLING = Tree(pairs_first=True)
BINOMIAL = Tree()

_RINGS = Schedule((Case(DOUBLING, fewer_than="members"), Case(RING)))


def _open_mpi(
    name: str, fold: str, schedule: Schedule, algorithm: int | None, segment: int | None = None
) -> Twin:
    settings: list[tuple[str, int]] = []
    if algorithm is not None:
        settings.append(("algorithm", algorithm))
    if segment is not None:
        settings.append(("segment", segment))
    return Twin(name, "Open MPI 5.0.11", fold, schedule, worker="openmpi", settings=tuple(settings))


_OWN_CHOICE = Schedule(
    (
        Case(DOUBLING, members=(1, 3), fewer_than="members"),
        Case(RING, members=(1, 3), bytes=(4 * KI, 8 * KI)),
        Case(RING, members=(1, 3), bytes=(16 * KI, 256 * KI)),
        Case(DOUBLING, members=(1, 15)),
    )
)

_NON_OVERLAPPING = Schedule(
    (
        Case(BINOMIAL, members=(1, 3), bytes=(8, 16)),
        Case(REVERSE, members=(1, 3)),
        Case(Binary(), members=(4, 7), bytes=(0, 4 * KI)),
        Case(REVERSE, members=(4, 7), bytes=(4 * KI, 64 * KI)),
        Case(BINOMIAL, members=(4, 7), bytes=(64 * KI, 256 * KI)),
        Case(REVERSE, members=(4, 7), bytes=(256 * KI, 512 * KI)),
        Case(BINOMIAL, members=(4, 7), bytes=(512 * KI, MI)),
        Case(REVERSE, members=(4, 7)),
        Case(Binary(), members=(8, 15), bytes=(0, 8 * KI)),
        Case(BINOMIAL, members=(8, 15)),
    )
)


def nccl_ring(*, chunk: int = 2 * MI, channels: int = 1) -> Schedule:
    """The order of NCCL's ring with other parameters than the twin's.

    `chunk`: bytes of a chunk that each rank reduces in one loop of a channel (it depends on the
    protocol and on NCCL_BUFFSIZE); `channels`: their number. NCCL logs both.

    >>> nccl_ring(channels=2).cases[0].fold.cut
    Loops(chunk=2097152, align=16, channels=2)
    """
    cut = Loops(chunk=chunk, align=16, channels=channels)
    return _always(Walk(start=1, cut=cut), hops="own", formats=HALVES)


_ALL = (
    Twin(
        "xla-cpu",
        "XLA:CPU, by JAX 0.10.2",
        "linear, from +0; 8-bit types in float16, bfloat16 in float32",
        _always(LINEAR, from_zero=True),
        dtypes=(*HALVES, "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
        worker="xla",
    ),
    _open_mpi(
        "openmpi",
        "its own choice: recursive doubling; with 2 or 3 ranks the ring from 4 KiB to 8 KiB and "
        "from 16 KiB to 256 KiB; known for up to 15 ranks",
        _OWN_CHOICE,
        None,
    ),
    _open_mpi("openmpi-linear", "reverse", _always(REVERSE), 1),
    _open_mpi(
        "openmpi-nonoverlapping",
        "by size and ranks a binary tree, reverse or tree; known for up to 15 ranks",
        _NON_OVERLAPPING,
        2,
    ),
    _open_mpi(
        "openmpi-recursive-doubling",
        "the first R - p pairs (p the largest power of two), then a tree over p values",
        _always(DOUBLING),
        3,
    ),
    _open_mpi("openmpi-ring", "ring; with fewer elements than ranks recursive doubling", _RINGS, 4),
    _open_mpi(
        "openmpi-segmented-ring",
        "the same, whatever the segments' size",
        _RINGS,
        5,
        4096,
    ),
    _open_mpi(
        "openmpi-rabenseifner",
        "as recursive doubling; with fewer elements than p reverse",
        Schedule((Case(REVERSE, fewer_than="power"), Case(DOUBLING))),
        6,
    ),
    Twin(
        "mpich",
        "MPICH 5.0.2",
        "as recursive doubling, at all sizes",
        _always(DOUBLING),
        worker="mpich",
    ),
    Twin(
        "gloo-ring",
        "gloo, by PyTorch 2.13.0",
        "block b starts at b - 1 and goes down; blocks of whole segments of at most 1 MiB, two or "
        "more for each rank; float16 and bfloat16 partial sums in themselves",
        _always(Walk(start=-1, step=-1, cut=Segments()), hops="own", formats=HALVES),
        dtypes=HALVES,
        worker="gloo",
    ),
    Twin(
        "nccl-ring",
        "NCCL 2.30, protocol Simple, one channel",
        "block b starts at b + 1 and goes up; loops over chunks of 2 MiB for each rank; float16 "
        "and bfloat16 partial sums in themselves",
        nccl_ring(),
        checked=DOCUMENTED,
        dtypes=HALVES,
    ),
    Twin(
        "nccl-tree",
        "NCCL 2.30, one node",
        "the tree of one node is a chain: reverse; float16 and bfloat16 partial sums in themselves",
        _always(REVERSE, hops="own", formats=HALVES),
        checked=DOCUMENTED,
        dtypes=HALVES,
    ),
    Twin(
        "gcl-ring",
        "Graphcore's GCL, clockwise ring",
        "block b starts at b + 1 and goes up, in the replicas' order; blocks of one length, the "
        "last one what is left; float16 partial sums in themselves",
        _always(
            Walk(start=1, cut=Segments(most=1 << 62, least=1)),
            hops="own",
            formats=("float16", "float32"),
        ),
        checked=DOCUMENTED,
        dtypes=("float16", "float32"),
    ),
)

#: The twins that are orders, by name, in the order of the documentation.
TWINS: dict[str, Twin] = {twin.name: twin for twin in _ALL}


def _torch_hook(name: str, dtype: str) -> Twin:
    # gloo cuts values of 16 bits: as many elements in 2 MiB of float32 as in 1 MiB of these.
    ring = Walk(start=-1, step=-1, cut=Segments(most=2 * MI))
    return Twin(
        f"torch-{name}-hook",
        f"DDP's {name}_compress_hook over gloo, by PyTorch 2.13.0",
        f"pmean: each member rounded to {dtype}, divided by R in {dtype}, then gloo's ring with "
        f"{dtype} partial sums",
        _always(ring, formats=("float32",)),
        checked="gradients of DDP in real gloo processes, bit by bit; 2, 3, 4, 5 and 8 ranks; "
        "float32",
        dtypes=("float32",),
        fields=(("accumulate", dtype), ("wire", Wire(dtype, at="members")), ("divide", "members")),
    )


_WITH_FIELDS = (
    _torch_hook("fp16", "float16"),
    _torch_hook("bf16", "bfloat16"),
    Twin(
        "nccl-nvls-float32",
        "NCCL's NVLS, the sum in NVSwitch, for float32 alone",
        "exact, rounded once; bfloat16 is added in another way, which is not known",
        _always(Exact(), formats=("float32",)),
        checked="reported by Megatron-LM's pull request 6634, not checked here",
        dtypes=("float32",),
    ),
)

#: The twins that are more than an order, by name: `Reduction.like` makes them.
SETTINGS: dict[str, Twin] = {twin.name: twin for twin in _WITH_FIELDS}
