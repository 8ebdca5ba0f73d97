"""The launchers' variables: real sets of them, incomplete ones, and several at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusim.runtime.environment import Launch, PopDist, popdist, read, spread

OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
MPICH = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "0"}
ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = ALLOCATION | {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
BY_HAND = {"WORLD_SIZE": "3", "RANK": "2", "LOCAL_RANK": "2"}
TORCHRUN = BY_HAND | {"TORCHELASTIC_RUN_ID": "none"}
POPDIST = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "6",
    "POPDIST_NUM_IPUS_PER_REPLICA": "1",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    "POPDIST_LOCAL_INSTANCE_INDEX": "1",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Launch()),
        (OPENMPI, Launch("openmpi", 4, 3, 1)),
        (MPICH, Launch("mpich", 2, 1, 0)),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, Launch("mpich", 2, 1, 1)),  # no local rank: one host
        (STEP, Launch("slurm", 2, 1, 0)),
        (TORCHRUN, Launch("torchrun", 3, 2, 2)),
        (BY_HAND, Launch("torchrun", 3, 2, 2)),
        (POPDIST | OPENMPI, Launch("popdist+openmpi", 4, 3, 1, 8, 2, 6, 1, True)),
        (
            {
                "POPDIST_NUM_TOTAL_REPLICAS": "8",
                "POPDIST_NUM_LOCAL_REPLICAS": "8",
                "POPDIST_REPLICA_INDEX_OFFSET": "0",
            },
            Launch("popdist", 1, 0, 0, 8, 8, 0),
        ),
    ],
)
def test_a_launchers_variables_are_understood(environ: dict[str, str], expected: Launch) -> None:
    assert read(environ | {"PATH": "/bin"}) == expected


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291"])  # none, salloc's, sbatch's
def test_a_slurm_allocation_is_no_job_of_many(step: str) -> None:
    assert read(ALLOCATION | {"SLURM_STEP_ID": step}) == Launch()


def test_rank_alone_is_anybodys_variable() -> None:
    assert read({"RANK": "sergeant"}) == Launch()


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (STEP | OPENMPI, "openmpi"),  # srun starts mpirun's daemons
        (OPENMPI | BY_HAND, "openmpi"),  # a cluster's defaults
        (OPENMPI | TORCHRUN, "torchrun"),  # a torchrun a host
        (STEP | TORCHRUN, "torchrun"),
        (STEP | {"PMI_SIZE": "2", "PMI_RANK": "1"}, "mpich"),  # srun --mpi=pmi2
    ],
)
def test_of_several_launchers_the_innermost_counts(environ: dict[str, str], launcher: str) -> None:
    assert read(environ).launcher == launcher


NOT_SET = " is not set: expected a whole number of at least "


@pytest.mark.parametrize(
    ("environ", "lines"),
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "2"},
            [f"OMPI_COMM_WORLD_RANK{NOT_SET}0", f"OMPI_COMM_WORLD_LOCAL_RANK{NOT_SET}0"],
        ),
        ({"PMI_RANK": "2"}, [f"PMI_SIZE{NOT_SET}1"]),
        (MPICH | {"PMI_RANK": "2"}, ["PMI_RANK='2': expected less than PMI_SIZE='2'"]),
        (MPICH | {"PMI_SIZE": "1_0"}, ["PMI_SIZE='1_0': expected a whole number of at least 1"]),
        (MPICH | {"PMI_SIZE": "9" * 30}, [f"PMI_SIZE='{'9' * 30}': expected a whole number ..."]),
        ({"WORLD_SIZE": "2"}, [f"RANK{NOT_SET}0", f"LOCAL_RANK{NOT_SET}0"]),
        (
            {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
            [f"SLURM_PROCID{NOT_SET}0", f"SLURM_LOCALID{NOT_SET}0"],
        ),
        (
            {"POPDIST_NUM_TOTAL_REPLICAS": "0", "POPDIST_NUM_IPUS_PER_REPLICA": "-1"},
            [
                "POPDIST_NUM_TOTAL_REPLICAS='0': expected a whole number of at least 1",
                f"POPDIST_NUM_LOCAL_REPLICAS{NOT_SET}1",
                f"POPDIST_REPLICA_INDEX_OFFSET{NOT_SET}0",
                "POPDIST_NUM_IPUS_PER_REPLICA='-1': expected a whole number of at least 1",
            ],
        ),
        (
            POPDIST | {"POPDIST_REPLICA_INDEX_OFFSET": "7"},
            ["POPDIST_REPLICA_INDEX_OFFSET='7', POPDIST_NUM_LOCAL_REPLICAS='2': expected ..."],
        ),
        (
            POPDIST | {"POPDIST_NUM_LOCAL_REPLICAS": "1", "POPDIST_REPLICA_INDEX_OFFSET": "7"},
            ["POPDIST_NUM_TOTAL_REPLICAS='8': expected 4, POPDIST_NUM_LOCAL_REPLICAS='1' for ..."],
        ),
        (
            POPDIST | {"POPDIST_NUM_TOTAL_REPLICAS": "9"},
            ["POPDIST_NUM_LOCAL_REPLICAS='2': expected a divisor of POPDIST_NUM_TOTAL_REPLICAS..."],
        ),
        (
            POPDIST | {"POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "2"},
            ["POPDIST_UNIFORM_REPLICAS_PER_INSTANCE='2': expected 0 or 1"],
        ),
        (
            POPDIST | {"POPDIST_LOCAL_INSTANCE_INDEX": "4"},
            ["POPDIST_LOCAL_INSTANCE_INDEX='4': expected less than 4 for OMPI_COMM_WORLD_SIZE..."],
        ),
        (
            POPDIST | {"POPDIST_REPLICA_INDEX_OFFSET": "4"},  # instance 2's
            [
                "POPDIST_REPLICA_INDEX_OFFSET='4': expected 6 for OMPI_COMM_WORLD_SIZE='4', "
                "OMPI_COMM_WORLD_RANK='3'"
            ],
        ),
        (
            POPDIST
            | {
                "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "0",
                "POPDIST_REPLICA_INDEX_OFFSET": "2",  # three instances before it, and none after
            },
            [
                "POPDIST_REPLICA_INDEX_OFFSET='2': expected at least 3 for ...",
                "POPDIST_NUM_TOTAL_REPLICAS='8': expected 4 for ...",
            ],
        ),
    ],
)
def test_half_set_and_contradictory_variables_are_named(
    environ: dict[str, str], lines: list[str]
) -> None:
    given = (OPENMPI if "POPDIST_LOCAL_INSTANCE_INDEX" in environ else {}) | environ
    with pytest.raises(ValueError, match="do not fit together:\n") as caught:
        read(given)
    found = str(caught.value).splitlines()[1:]
    assert len(found) == len(lines), found
    for line, expected in zip(found, lines, strict=True):
        assert re.fullmatch(re.escape(f"  {expected}").replace(r"\.\.\.", ".*"), line), line


def test_popdist_for_many_without_a_launcher_is_no_single_instance() -> None:
    with pytest.raises(ValueError, match="no launcher's variables are set"):
        read(POPDIST)
    assert popdist(POPDIST) == PopDist(8, 2, 6, 1, True, 1)  # which say nothing wrong by themselves


@given(replicas=st.integers(1, 40), instances=st.integers(1, 9))
def test_every_instance_of_an_even_spread_is_accepted(replicas: int, instances: int) -> None:
    held = spread(replicas, instances)
    assert sum(held) == replicas and held == tuple(sorted(held, reverse=True))
    assert max(held) - min(held) <= 1
    if replicas < instances:
        return  # PopDist knows no instance without replicas
    uniform = replicas % instances == 0
    for instance, local in enumerate(held):
        offset = sum(held[:instance])
        found = read(
            {
                "OMPI_COMM_WORLD_SIZE": str(instances),
                "OMPI_COMM_WORLD_RANK": str(instance),
                "OMPI_COMM_WORLD_LOCAL_RANK": str(instance),
                "POPDIST_NUM_TOTAL_REPLICAS": str(replicas),
                "POPDIST_NUM_LOCAL_REPLICAS": str(local),
                "POPDIST_REPLICA_INDEX_OFFSET": str(offset),
                "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": str(int(uniform)),
            }
        )
        assert (found.total_replicas, found.local_replicas, found.replica_offset) == (
            replicas,
            local,
            offset,
        )


@pytest.mark.parametrize(("replicas", "instances"), [(-1, 1), (1, 0)])
def test_spread_refuses_impossible_numbers(replicas: int, instances: int) -> None:
    with pytest.raises(ValueError, match="expected a number of at least"):
        spread(replicas, instances)
