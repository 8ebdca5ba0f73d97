"""The launcher's variables: the number of instances, and the number of this one.

`read` understands those of PopDist, Open MPI, MPICH, Slurm and torchrun.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch", "PopDist", "popdist", "read", "spread"]

# From here on Slurm numbers the shells of salloc and sbatch, which are not steps of several tasks.
SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0
TORCHRUN_ITSELF = "TORCHELASTIC_RUN_ID"  # not set where WORLD_SIZE and RANK are set by hand


@dataclass(frozen=True)
class Variables:
    """The names of a launcher's variables; of several names the first that is set counts."""

    launcher: str
    size: tuple[str, ...]
    rank: tuple[str, ...]
    local: tuple[str, ...]
    local_required: bool = True


OPENMPI = Variables(
    "openmpi",
    ("OMPI_COMM_WORLD_SIZE",),
    ("OMPI_COMM_WORLD_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_RANK",),
)
MPICH = Variables("mpich", ("PMI_SIZE",), ("PMI_RANK",), ("MPI_LOCALRANKID",), local_required=False)
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
REQUIRED = (TOTAL, LOCAL, OFFSET)  # without them the replicas have no numbers


@dataclass(frozen=True)
class PopDist:
    """The values of PopDist's variables; None where one is not set."""

    total_replicas: int | None = None
    local_replicas: int | None = None
    replica_offset: int | None = None
    ipus_per_replica: int | None = None
    uniform: bool | None = None
    local_instance: int | None = None

    @property
    def is_set(self) -> bool:
        """Whether PopDist's variables count the replicas."""
        return self.total_replicas is not None


@dataclass(frozen=True)
class Launch:
    """How this process was started.

    **Arguments**

    - `launcher`: "openmpi", "mpich", "slurm", "torchrun", or None. With PopDist's variables
      "popdist" comes first: "popdist+openmpi", or "popdist" alone.
    - `instances`, `instance`: the number of processes, and the number of this one.
    - `local_instance`: its number among the processes on its host.
    - the others: PopDist's values, None where not set.
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
    """How this process was started; a single instance without a launcher's variables.

    Of nested launchers the innermost counts: torchrun, Open MPI, MPICH, Slurm (in a step: the
    variables of an allocation alone mean nothing), then WORLD_SIZE and RANK set by hand.

    **Raises**: ValueError for variables that are missing or contradict each other. It names each
    variable, its value, and the expected one.

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
    replicas = popdist(environ)
    names = ["popdist"] if replicas.is_set else []
    instances, instance, local_instance = 1, 0, 0
    if launcher := innermost(environ):
        instances, instance, local_instance = processes(environ, launcher)
        names.append(launcher.launcher)
    if replicas.is_set:
        check_consistent(environ, replicas, launcher, instances, instance)
    if replicas.local_instance is not None:
        local_instance = replicas.local_instance
    return Launch(
        "+".join(names) or None,
        instances,
        instance,
        local_instance,
        replicas.total_replicas,
        replicas.local_replicas,
        replicas.replica_offset,
        replicas.ipus_per_replica,
        replicas.uniform,
    )


def popdist(environ: Mapping[str, str] = os.environ) -> PopDist:
    """The values of PopDist's variables, without a check against the launcher's.

    **Raises**: ValueError for variables that are missing or contradict each other.

    >>> popdist({"POPDIST_NUM_TOTAL_REPLICAS": "8", "POPDIST_NUM_LOCAL_REPLICAS": "4"})
    Traceback (most recent call last):
    ...
    ValueError: PopDist's variables do not fit together:
      POPDIST_REPLICA_INDEX_OFFSET is not set: expected a whole number of at least 0
    """
    if not any(value_of(environ, name) for name in SMALLEST):
        return PopDist()
    problems: list[str] = []
    found = {
        name: number(environ, (name,), smallest, problems, required=name in REQUIRED)
        for name, smallest in SMALLEST.items()
    }
    if found[UNIFORM] not in (None, 0, 1):
        problems.append(f"{shown(environ, UNIFORM)}: expected 0 or 1")
    total, local, offset = found[TOTAL], found[LOCAL], found[OFFSET]
    if total is not None and local is not None and offset is not None:
        replicas = f"{shown(environ, OFFSET)}, {shown(environ, LOCAL)}"
        if offset + local > total:
            problems.append(f"{replicas}: expected their sum to be at most {shown(environ, TOTAL)}")
        elif found[UNIFORM] == 1 and (total % local or offset % local):
            problems.append(
                f"{shown(environ, LOCAL)}: expected a divisor of {shown(environ, TOTAL)} and "
                f"{shown(environ, OFFSET)}, as {shown(environ, UNIFORM)}"
            )
    raise_if("PopDist's variables", problems)
    uniform = None if found[UNIFORM] is None else bool(found[UNIFORM])
    return PopDist(total, local, offset, found[IPUS], uniform, found[LOCAL_INSTANCE])


def spread(replicas: int, instances: int) -> tuple[int, ...]:
    """The number of replicas of each instance: equal shares, the first ones one larger.

    ValueError for a negative number of replicas, and for fewer than one instance.

    >>> spread(7, 4)
    (2, 2, 2, 1)
    """
    for name, value, least in (("replicas", replicas, 0), ("instances", instances, 1)):
        if value < least:
            raise ValueError(f"{name}={value!r}: expected a number of at least {least}")
    share, more = divmod(replicas, instances)
    return tuple(share + (i < more) for i in range(instances))


# ---------------------------------------------------------------- one variable


def value_of(environ: Mapping[str, str], name: str) -> str:
    """The value of a variable; empty if it is not set."""
    return environ.get(name, "").strip()


def shown(environ: Mapping[str, str], name: str) -> str:
    return f"{name}={environ[name]!r}"


def number(
    environ: Mapping[str, str],
    names: tuple[str, ...],
    smallest: int,
    problems: list[str],
    *,
    required: bool = True,
) -> int | None:
    """The first of these variables that is set; None, and a line in `problems`, if invalid."""
    name = first_set(environ, names)
    expected = f"expected a whole number of at least {smallest}"
    if name is None:
        if required:
            problems.append(f"{names[0]} is not set: {expected}")
        return None
    text = value_of(environ, name)
    # ASCII digits only: int() accepts "1_6" and the digits of other scripts
    if text.isascii() and text.isdigit() and int(text[:18]) >= smallest and len(text) <= 18:
        return int(text)
    problems.append(f"{shown(environ, name)}: {expected}")
    return None


def first_set(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if value_of(environ, name)), None)


def raise_if(variables: str, problems: list[str]) -> None:
    if problems:
        raise ValueError("\n  ".join([f"{variables} do not fit together:", *problems]))


# ---------------------------------------------------------------- launchers


def innermost(environ: Mapping[str, str]) -> Variables | None:
    """The launcher that started this process itself."""
    present = (
        (TORCHRUN, bool(value_of(environ, TORCHRUN_ITSELF))),
        (OPENMPI, either_set(environ, OPENMPI)),
        (MPICH, either_set(environ, MPICH)),
        (SLURM, in_slurm_step(environ)),
        # RANK alone may have another meaning
        (TORCHRUN, bool(value_of(environ, "WORLD_SIZE"))),
    )
    return next((launcher for launcher, is_set in present if is_set), None)


def either_set(environ: Mapping[str, str], launcher: Variables) -> bool:
    return first_set(environ, launcher.size + launcher.rank) is not None


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process, rather than a shell in an allocation or a batch script.

    Those also have SLURM_NTASKS, the tasks that a step may have, and sometimes SLURM_PROCID=0.
    """
    step = value_of(environ, "SLURM_STEP_ID") or value_of(environ, "SLURM_STEPID")
    return step.isascii() and step.isdigit() and int(step) < SLURM_FIRST_SPECIAL_STEP


def processes(environ: Mapping[str, str], launcher: Variables) -> tuple[int, int, int]:
    """The number of processes, the rank of this one, and its rank on its host."""
    problems: list[str] = []
    size = number(environ, launcher.size, 1, problems)
    rank = number(environ, launcher.rank, 0, problems)
    local = number(environ, launcher.local, 0, problems, required=launcher.local_required)
    for names, value in ((launcher.rank, rank), (launcher.local, local)):
        if size is not None and value is not None and value >= size:
            name, limit = first_set(environ, names), first_set(environ, launcher.size)
            assert name and limit
            problems.append(f"{shown(environ, name)}: expected less than {shown(environ, limit)}")
    raise_if(f"the variables of {launcher.launcher}", problems)
    assert size is not None and rank is not None
    return size, rank, rank if local is None else local


def check_consistent(
    environ: Mapping[str, str],
    replicas: PopDist,
    launcher: Variables | None,
    instances: int,
    instance: int,
) -> None:
    """ValueError if PopDist's variables contradict the launcher's."""
    total, local = replicas.total_replicas, replicas.local_replicas
    offset = replicas.replica_offset
    assert total is not None and local is not None and offset is not None
    if launcher is None:
        context = "a single instance, as no launcher's variables are set (poprun sets them)"
    else:
        size, rank = first_set(environ, launcher.size), first_set(environ, launcher.rank)
        assert size and rank
        context = f"{shown(environ, size)}, {shown(environ, rank)}"
    before, after = instance, instances - 1 - instance
    rest = total - offset - local
    problems = []
    if replicas.uniform and total != local * instances:
        problems.append(
            f"{shown(environ, TOTAL)}: expected {local * instances}, "
            f"{shown(environ, LOCAL)} for each of {context}"
        )
    elif replicas.uniform and offset != local * instance:
        problems.append(f"{shown(environ, OFFSET)}: expected {local * instance} for {context}")
    else:
        if offset < before or (offset and not before):
            problems.append(f"{shown(environ, OFFSET)}: expected {at_least(before)} for {context}")
        if rest < after or (rest and not after):
            problems.append(
                f"{shown(environ, TOTAL)}: expected {at_least(offset + local, after)} for "
                f"{context}, {shown(environ, OFFSET)}, {shown(environ, LOCAL)}"
            )
    if replicas.local_instance is not None and replicas.local_instance >= instances:
        problems.append(
            f"{shown(environ, LOCAL_INSTANCE)}: expected less than {instances} for {context}"
        )
    raise_if("PopDist's variables and the launcher's", problems)


def at_least(known: int, more: int | None = None) -> str:
    """The expected number if each instance before or after this one has at least one replica."""
    if more is None:
        return f"at least {known}" if known else "0"
    return f"at least {known + more}" if more else str(known)
