"""What the launcher's variables say: how many instances there are, and which one this process is.

Reads PopDist's, Open MPI's, MPICH's, Slurm's and torchrun's; everything else asks `read`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch", "PopDist", "popdist", "read", "spread"]

# Slurm numbers the shells of salloc and sbatch from here on down: no steps of several tasks.
SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0
TORCHRUN_ITSELF = "TORCHELASTIC_RUN_ID"  # who sets WORLD_SIZE and RANK by hand does not set it


@dataclass(frozen=True)
class Variables:
    """The names under which a launcher says how many processes it started and which this is.

    Of several names the first that is set counts.
    """

    launcher: str
    size: tuple[str, ...]
    rank: tuple[str, ...]
    local: tuple[str, ...]
    local_needed: bool = True


OPENMPI = Variables(
    "openmpi",
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
)
MPICH = Variables("mpich", ("PMI_SIZE",), ("PMI_RANK",), ("MPI_LOCALRANKID",), local_needed=False)
SLURM = Variables(
    "slurm",
    ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ("SLURM_PROCID",),
    ("SLURM_LOCALID",),
)
TORCHRUN = Variables("torchrun", ("WORLD_SIZE",), ("RANK",), ("LOCAL_RANK",))

TOTAL = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL = "POPDIST_NUM_LOCAL_REPLICAS"
OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
IPUS = "POPDIST_NUM_IPUS_PER_REPLICA"
UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"
SMALLEST = {TOTAL: 1, LOCAL: 1, OFFSET: 0, IPUS: 1, UNIFORM: 0, LOCAL_INSTANCE: 0}
NEEDED = (TOTAL, LOCAL, OFFSET)  # without them a replica does not know its number


@dataclass(frozen=True)
class PopDist:
    """What PopDist's variables say; None where one is not set."""

    total_replicas: int | None = None
    local_replicas: int | None = None
    replica_offset: int | None = None
    ipus_per_replica: int | None = None
    uniform: bool | None = None
    local_instance: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether the replicas are counted by PopDist's variables."""
        return self.total_replicas is not None


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    **Arguments**

    - `launcher`: who started it: "openmpi", "mpich", "slurm", "torchrun", or None. With PopDist's
      variables "popdist" comes first: "popdist+openmpi", or "popdist" alone.
    - `instances`, `instance`: how many processes there are, and which this is.
    - `local_instance`: which it is among those on its host.
    - the others: PopDist's own values, None where not set.
    """

    launcher: str | None = None
    instances: int = 1
    instance: int = 0
    local_instance: int = 0
    total_replicas: int | None = None
    local_replicas: int | None = None
    replica_offset: int | None = None
    ipus_per_replica: int | None = None
    uniform: bool | None = None


def read(environ: Mapping[str, str] = os.environ) -> Launch:
    """How this process was started; one instance of one where no launcher has left variables.

    Of launchers inside one another the innermost counts: torchrun, Open MPI, MPICH, Slurm (in a
    step: the variables of an allocation alone mean nothing), then WORLD_SIZE and RANK by hand.

    ValueError for an environment that is half set or contradicts itself; it names each variable,
    what it holds, and what is expected.

    >>> read({})
    Launch(launcher=None, instances=1, instance=0, local_instance=0, ...)
    >>> launch = read({"PMI_SIZE": "4", "PMI_RANK": "3"})
    >>> launch.launcher, launch.instances, launch.instance
    ('mpich', 4, 3)
    >>> read({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "2"})
    Traceback (most recent call last):
    ...
    ValueError: the variables of openmpi do not fit together:
      OMPI_COMM_WORLD_LOCAL_RANK is not set: expected a whole number of at least 0
      OMPI_COMM_WORLD_RANK='2': expected less than OMPI_COMM_WORLD_SIZE='2'
    """
    counted = popdist(environ)
    names = ["popdist"] if counted.is_set else []
    instances, instance, local_instance = 1, 0, 0
    if found := innermost(environ):
        instances, instance, local_instance = processes(environ, found)
        names.append(found.launcher)
    if counted.is_set:
        check_fits(environ, counted, found, instances, instance)
    if counted.local_instance is not None:
        local_instance = counted.local_instance
    return Launch(
        "+".join(names) or None,
        instances,
        instance,
        local_instance,
        counted.total_replicas,
        counted.local_replicas,
        counted.replica_offset,
        counted.ipus_per_replica,
        counted.uniform,
    )


def popdist(environ: Mapping[str, str] = os.environ) -> PopDist:
    """What PopDist's variables say, without asking whether a launcher agrees.

    ValueError if they are half set or contradict each other.

    >>> popdist({"POPDIST_NUM_TOTAL_REPLICAS": "8", "POPDIST_NUM_LOCAL_REPLICAS": "4"})
    Traceback (most recent call last):
    ...
    ValueError: PopDist's variables do not fit together:
      POPDIST_REPLICA_INDEX_OFFSET is not set: expected a whole number of at least 0
    """
    if not any(value_of(environ, name) for name in SMALLEST):
        return PopDist()
    wrong: list[str] = []
    found = {
        name: number(environ, (name,), smallest, wrong, needed=name in NEEDED)
        for name, smallest in SMALLEST.items()
    }
    if found[UNIFORM] not in (None, 0, 1):
        wrong.append(f"{shown(environ, UNIFORM)}: expected 0 or 1")
    total, local, offset = found[TOTAL], found[LOCAL], found[OFFSET]
    if total is not None and local is not None and offset is not None:
        replicas = f"{shown(environ, OFFSET)}, {shown(environ, LOCAL)}"
        if offset + local > total:
            wrong.append(f"{replicas}: expected their sum to be at most {shown(environ, TOTAL)}")
        elif found[UNIFORM] == 1 and (total % local or offset % local):
            wrong.append(
                f"{shown(environ, LOCAL)}: expected a divisor of {shown(environ, TOTAL)} and "
                f"{shown(environ, OFFSET)}, as {shown(environ, UNIFORM)}"
            )
    refuse("PopDist's variables", wrong)
    uniform = None if found[UNIFORM] is None else bool(found[UNIFORM])
    return PopDist(total, local, offset, found[IPUS], uniform, found[LOCAL_INSTANCE])


def spread(replicas: int, instances: int) -> tuple[int, ...]:
    """How many replicas each instance holds: equal shares, the first ones holding one more.

    ValueError for a negative number of replicas, and for fewer than one instance.

    >>> spread(7, 4)
    (2, 2, 2, 1)
    """
    for name, given, least in (("replicas", replicas, 0), ("instances", instances, 1)):
        if given < least:
            raise ValueError(f"{name}={given!r}: expected a number of at least {least}")
    share, more = divmod(replicas, instances)
    return tuple(share + (i < more) for i in range(instances))


# ---------------------------------------------------------------- one variable


def value_of(environ: Mapping[str, str], name: str) -> str:
    """A variable's text; an empty one is not set."""
    return environ.get(name, "").strip()


def shown(environ: Mapping[str, str], name: str) -> str:
    return f"{name}={environ[name]!r}"


def number(
    environ: Mapping[str, str],
    names: tuple[str, ...],
    smallest: int,
    wrong: list[str],
    *,
    needed: bool = True,
) -> int | None:
    """The first of these variables that is set; None, and a line in `wrong`, if it is no number."""
    name = first_set(environ, names)
    expected = f"expected a whole number of at least {smallest}"
    if name is None:
        if needed:
            wrong.append(f"{names[0]} is not set: {expected}")
        return None
    text = value_of(environ, name)
    # ASCII digits alone: int() would take "1_6", and other scripts' digits
    if text.isascii() and text.isdigit() and int(text[:18]) >= smallest and len(text) <= 18:
        return int(text)
    wrong.append(f"{shown(environ, name)}: {expected}")
    return None


def first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if value_of(environ, name)), None)


def refuse(whose: str, wrong: list[str]) -> None:
    if wrong:
        raise ValueError("\n  ".join([f"{whose} do not fit together:", *wrong]))


# ---------------------------------------------------------------- launchers


def innermost(environ: Mapping[str, str]) -> Variables | None:
    """The launcher that started this very process."""
    present = (
        (TORCHRUN, bool(value_of(environ, TORCHRUN_ITSELF))),
        (OPENMPI, either_set(environ, OPENMPI)),
        (MPICH, either_set(environ, MPICH)),
        (SLURM, in_slurm_step(environ)),
        # RANK alone is anybody's variable
        (TORCHRUN, bool(value_of(environ, "WORLD_SIZE"))),
    )
    return next((launcher for launcher, is_there in present if is_there), None)


def either_set(environ: Mapping[str, str], launcher: Variables) -> bool:
    return first_set(environ, launcher.size + launcher.rank) is not None


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, not a shell in an allocation or a batch script.

    Those also have SLURM_NTASKS, which says what a step may use, and sometimes SLURM_PROCID=0.
    """
    step = value_of(environ, "SLURM_STEP_ID") or value_of(environ, "SLURM_STEPID")
    return step.isascii() and step.isdigit() and int(step) < SLURM_FIRST_SPECIAL_STEP


def processes(environ: Mapping[str, str], launcher: Variables) -> tuple[int, int, int]:
    """The number of processes, this one's, and this one's on its host."""
    wrong: list[str] = []
    size = number(environ, launcher.size, 1, wrong)
    rank = number(environ, launcher.rank, 0, wrong)
    local = number(environ, launcher.local, 0, wrong, needed=launcher.local_needed)
    for names, value in ((launcher.rank, rank), (launcher.local, local)):
        if size is not None and value is not None and value >= size:
            given, limit = first_set(environ, names), first_set(environ, launcher.size)
            assert given and limit
            wrong.append(f"{shown(environ, given)}: expected less than {shown(environ, limit)}")
    refuse(f"the variables of {launcher.launcher}", wrong)
    assert size is not None and rank is not None
    return size, rank, rank if local is None else local


def check_fits(
    environ: Mapping[str, str],
    counted: PopDist,
    launcher: Variables | None,
    instances: int,
    instance: int,
) -> None:
    """ValueError if PopDist's replicas are not those of so many instances and of this one."""
    total, local, offset = counted.total_replicas, counted.local_replicas, counted.replica_offset
    assert total is not None and local is not None and offset is not None
    if launcher is None:
        place = "a single instance, as no launcher's variables are set (poprun sets them)"
    else:
        size, rank = first_set(environ, launcher.size), first_set(environ, launcher.rank)
        assert size and rank
        place = f"{shown(environ, size)}, {shown(environ, rank)}"
    before, after = instance, instances - 1 - instance
    rest = total - offset - local
    wrong = []
    if counted.uniform and total != local * instances:
        wrong.append(
            f"{shown(environ, TOTAL)}: expected {local * instances}, "
            f"{shown(environ, LOCAL)} for each of {place}"
        )
    elif counted.uniform and offset != local * instance:
        wrong.append(f"{shown(environ, OFFSET)}: expected {local * instance} for {place}")
    else:
        if offset < before or (offset and not before):
            wrong.append(f"{shown(environ, OFFSET)}: expected {at_least(before)} for {place}")
        if rest < after or (rest and not after):
            wrong.append(
                f"{shown(environ, TOTAL)}: expected {at_least(offset + local, after)} for {place}, "
                f"{shown(environ, OFFSET)}, {shown(environ, LOCAL)}"
            )
    if counted.local_instance is not None and counted.local_instance >= instances:
        wrong.append(
            f"{shown(environ, LOCAL_INSTANCE)}: expected less than {instances} for {place}"
        )
    refuse("PopDist's variables and the launcher's", wrong)


def at_least(known: int, more: int | None = None) -> str:
    """What is expected where each instance before or after this one has at least one replica."""
    if more is None:
        return f"at least {known}" if known else "0"
    return f"at least {known + more}" if more else str(known)
