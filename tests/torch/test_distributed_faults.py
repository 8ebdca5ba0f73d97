"""Wrong programs of torch.distributed: the rank to blame is named at once, and nothing hangs."""

from __future__ import annotations

import random
import re
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim import CollectiveMismatchError, DeadlockError, GpusimError, Reduction, ReplicaError
from gpusim.torch.distributed import launch
from tests.oracles.budget import budget, seeds
from tests.torch.distributed_programs import PROGRAMS, start
from tests.torch.wrong_programs import (
    HERE,
    Step,
    X,
    asks_in_vain,
    crossed,
    crossed_messages,
    fails,
    mutated,
    never_stored,
    other_dtype,
    other_groups,
    other_message,
    other_operation,
    other_operator,
    other_root,
    other_shape,
    other_strides,
    random_step,
    returns_early,
    take_step,
    waits_for_no_one,
)

OURS = re.escape(__file__)  # where a test has its program itself


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            other_operation,
            [
                "all_reduce\\(float32\\[4\\], SUM",
                "broadcast\\(float32\\[4\\], root 0",
                "differ in operation$",
            ],
        ),
        (other_strides, ["differ in strides"]),
        (other_shape, ["float32\\[4\\]", "float32\\[5\\]", "differ in tensors"]),
        (other_dtype, ["float32\\[4\\]", "float64\\[4\\]", "differ in tensors"]),
        (other_root, ["root 0", "root 1", "differ in root"]),
        (other_operator, ["SUM", "MAX", "differ in op"]),
        (other_groups, ["makes group '1' of ranks", "ranks \\[0, 1, 2\\]", "ranks \\[1, 2\\]"]),
        (other_message, ["rank 1 sends float32\\[3\\]", "rank 2 receives float32\\[4\\]"]),
    ],
)
def test_ranks_whose_calls_differ(
    wrong: Callable[[int], None], said: list[str], schedule: str
) -> None:
    def program(rank: int) -> None:
        start()
        dist.barrier()
        wrong(rank)

    text = fails(program, 3, CollectiveMismatchError, "rank 2", HERE, *said, schedule=schedule)
    assert re.search("ranks? [01]", text)
    if wrong not in (other_groups, other_message):
        assert "ranks of group '0' (ranks 0 to 2) do not make the same call 1" in text


def test_a_name_that_is_no_reduction_is_answered_by_all_names() -> None:
    said = "launch: reduction='ncclring': expected an order (linear, reverse, tree, ring, exact, "
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        launch(start_alone, 2, reduction="ncclring")
    named = re.findall("[a-z0-9-]+", str(caught.value))
    assert {"nccl-ring", "gloo-ring", "torch-bf16-hook", *Reduction.twins()} <= set(named)


def start_alone(rank: int) -> None:
    dist.init_process_group("nccl")


def test_an_nccl_that_is_not_there_is_not_warned_of() -> None:
    """All backends are gpusim's, also those of other groups."""

    def program(rank: int) -> None:
        start_alone(rank)
        dist.new_group([0, 1], backend="nccl")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(program, 2)


@pytest.mark.parametrize("backend", ["nccl", "GLOO", "mpi", "ucc", "cpu:gloo,cuda:nccl", None])
def test_backends_are_those_of_torch(backend: str | None) -> None:
    def program(rank: int) -> tuple[str, float]:
        dist.init_process_group(backend)
        x = torch.tensor(rank + 1.0)
        dist.all_reduce(x)
        y = torch.ones(())
        dist.all_reduce(y, group=dist.new_group([0, 1], backend=backend))
        return dist.get_backend(), x.item() + y.item()

    assert launch(program, 2) == [((backend or "undefined").lower(), 5.0)] * 2


@pytest.mark.parametrize("backend", ["ncl", "cpu:gloo,cuda:ncl"])
def test_a_backend_that_torch_does_not_know(backend: str) -> None:
    def program(rank: int) -> None:
        dist.init_process_group(backend)

    fails(program, 2, ReplicaError, "raised AssertionError: Unknown backend type (cuda:)?ncl")


@pytest.mark.parametrize("start_them", ["spawn", "start_processes"])
def test_processes_that_are_no_ranks_are_noted(start_them: str) -> None:
    def program(rank: int) -> None:
        with pytest.warns(RuntimeWarning, match="are not simulated ranks; .*launch") as noted:
            getattr(torch.multiprocessing, start_them)(start_alone, nprocs=0)
        assert noted[0].filename == __file__ or start_them == "start_processes"

    launch(program, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.multiprocessing.spawn(start_alone, nprocs=0)


def test_an_exception_without_a_text_is_named() -> None:
    def program(rank: int) -> None:
        raise EOFError

    fails(program, 1, ReplicaError, "rank 0 raised EOFError$")


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            returns_early,
            ["ranks 0, 2 wait in all_reduce\\(float32\\[4\\], SUM", "rank 1 has returned"],
        ),
        (waits_for_no_one, ["rank 1 waits in recv from rank 0", "ranks 0, 2 have returned"]),
        (crossed, ["rank 0 waits in barrier.*group '2'", "rank 1 waits in barrier.*group '1'"]),
        (crossed_messages, ["rank 0 waits in send to rank 1", "rank 1 waits in send to rank 0"]),
        (never_stored, ["rank 1 waits in the store's wait for", "nothing"]),
        (asks_in_vain, ["rank 1 waits in recv from rank 0"]),
    ],
)
def test_ranks_that_wait_in_vain(
    wrong: Callable[[int], None], said: list[str], schedule: str
) -> None:
    def program(rank: int) -> None:
        start()
        wrong(rank)

    fails(program, 3, DeadlockError, "no rank can go on", HERE, *said, schedule=schedule)


def test_a_rank_that_raises_ends_the_others() -> None:
    def program(rank: int) -> None:
        start()
        if rank == 1:
            raise KeyError("weights")
        dist.barrier()

    fails(program, 3, ReplicaError, "rank 1 raised KeyError: 'weights'")


@pytest.fixture
def ddp_is_imported() -> None:
    """DDP imports for seconds when it is first used."""
    launch(lambda rank: PROGRAMS["ddp"](seed=0), 1)


def test_a_rank_that_raises_in_a_backward_pass_ends_the_others(ddp_is_imported: None) -> None:
    def program(rank: int) -> None:
        start()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        loss = model(torch.ones(1, 3)).sum()
        if rank == 1:
            raise KeyError("data")
        loss.backward()

    fails(program, 3, ReplicaError, "rank 1 raised KeyError: 'data'")


def test_a_missing_backward_pass_is_named(ddp_is_imported: None) -> None:
    def program(rank: int) -> None:
        start()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        loss = model(torch.ones(1, 3)).sum()
        if rank != 1:
            loss.backward()

    fails(program, 3, DeadlockError, "ranks 0, 2 wait in all_reduce", "rank 1 has returned", OURS)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dist.all_gather([X.clone()] * 2, X), "expected a list of 3 tensors"),
        (lambda: dist.all_gather_into_tensor(torch.ones(5), X), "output of 3 times the input's"),
        (lambda: dist.all_to_all_single(torch.ones(4), X), "3 sizes of the output"),
        (
            lambda: dist.all_to_all_single(torch.ones(3), X, [1, 1, 1], [1, 1, 1]),
            "sum to its 4 rows",
        ),
        (
            lambda: dist.reduce_scatter_tensor(
                torch.ones(1).bool(), torch.ones(3).bool(), dist.ReduceOp.AVG
            ),
            "ReduceOp.AVG is not defined for bool",
        ),
        (lambda: dist.all_reduce(torch.ones(4, 4)[:, ::2]), "without gaps in its memory"),
        (
            lambda: dist.reduce(torch.ones(2, dtype=torch.complex64), 0, dist.ReduceOp.PRODUCT),
            "ReduceOp.PRODUCT is not defined for torch.complex64",
        ),
        (lambda: dist.all_reduce(X.clone(), dist.ReduceOp.BAND), "BAND is for integers and bool"),
        (
            lambda: dist.all_reduce(torch.ones(3).to_sparse(), dist.ReduceOp.MAX),
            "sparse tensors only works with ReduceOp.SUM, got ReduceOp.MAX",
        ),
        (lambda: dist.all_reduce(X.clone(), group="a"), "ValueError: Process group a is not init"),
    ],
)
def test_arguments_that_do_not_fit(call: Callable[[], Any], said: str) -> None:
    def program(rank: int) -> None:
        start()
        call()

    fails(program, 3, ReplicaError, said)


def test_splits_that_do_not_meet() -> None:
    def program(rank: int) -> None:
        start()
        sends = [2, 2] if rank else [1, 3]
        dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], sends)

    fails(program, 2, ReplicaError, "rank 0 sends 1 elements to rank 0, which expects 2")


def test_groups_are_not_used_after_they_are_destroyed() -> None:
    def subgroup(rank: int) -> None:
        start()
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        group.allreduce([X.clone()])

    fails(subgroup, 2, ReplicaError, "rank 0.*destroyed the group at", OURS)

    def world(rank: int) -> None:
        start()
        dist.destroy_process_group()
        dist.barrier()

    fails(world, 2, ReplicaError, "process group has not been initialized")


def test_a_world_can_be_made_again() -> None:
    def program(rank: int) -> float:
        for number in range(3):
            start()
            x = torch.ones(1) * number
            dist.all_reduce(x)
            dist.destroy_process_group()
        return x.item()

    assert launch(program, 3) == [6.0] * 3


def test_threads_that_are_no_ranks() -> None:
    def program(rank: int) -> None:
        start()
        group = dist.group.WORLD
        errors: list[BaseException] = []

        def other() -> None:
            try:
                group.allreduce([X.clone()])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        (error,) = errors
        assert isinstance(error, GpusimError)
        assert f"all_reduce of rank {rank} was called from a thread that the rank" in str(error)

    launch(program, 2)


@pytest.mark.parametrize("processes", [False, *([True] if sys.platform == "linux" else [])])
def test_gloo_gathers_tensors_of_one_shape(processes: bool) -> None:
    """As ProcessGroupGloo: "invalid tensor size at index 1". nccl gathers what differs."""

    def program(rank: int, backend: str) -> list[list[float]]:
        dist.init_process_group(backend)
        row = [torch.zeros(1), torch.zeros(2)]
        dist.all_gather(row, torch.full((rank + 1,), float(rank)))
        return [each.tolist() for each in row]

    for backend, order in (("nccl", None), ("cuda:gloo,cpu:nccl", None), ("nccl", "nccl-ring")):
        found = launch(program, 2, (backend,), reduction=order, processes=processes)
        assert found == [[[0.0], [1.0, 1.0]]] * 2
    for backend, order in (("gloo", None), ("cpu:gloo,cuda:nccl", None), ("nccl", "gloo-ring")):
        said = r"all_gather on .*: gloo gathers .* output float32\[2\] for the input float32\[1\]"
        with pytest.raises(ReplicaError, match=said):
            launch(program, 2, (backend,), reduction=order, processes=processes)
    both = "cpu:gloo,cuda:nccl"  # where the host plays cuda
    assert launch(program, 2, (both,), device="cpu", processes=processes) == found


@pytest.mark.parametrize("processes", [False, *([True] if sys.platform == "linux" else [])])
def test_a_rank_that_exits_well_has_succeeded(processes: bool) -> None:
    def program(rank: int, code: Any) -> int:
        if rank == 1:
            sys.exit(code)
        return rank

    for code in (None, 0):
        assert launch(program, 3, (code,), processes=processes) == [0, None, 2]
    for code, said in ((3, "SystemExit: 3"), ("bad", "SystemExit: bad")):
        with pytest.raises(ReplicaError, match=f"rank 1 raised {said}"):
            launch(program, 3, (code,), processes=processes)


def test_another_rank_or_size_is_refused() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo", rank=1 - rank, world_size=2)

    fails(program, 2, ReplicaError, "rank=1, but this is rank 0 of 2 ranks")


def test_random_wrong_programs_end_and_name_a_rank() -> None:
    failed = 0
    count = budget(1000, most=60)
    for seed in seeds(count):
        draw = random.Random(seed)
        size = draw.randrange(2, 5)
        steps = [random_step(draw) for _ in range(draw.randrange(2, 7))]
        wrong, culprit = mutated(draw, steps), draw.randrange(size)

        def program(
            rank: int,
            size: int = size,
            steps: list[Step] = steps,
            wrong: list[Step] = wrong,
            culprit: int = culprit,
        ) -> None:
            start()
            pair = dist.new_group([0, 1])
            for step in wrong if rank == culprit else steps:
                take_step(step, rank, size, pair)

        try:
            launch(program, size, schedule=draw.choice(["turns", "free"]))
        except GpusimError as error:
            failed += 1
            assert re.search(r"ranks? \d", str(error)), error
    assert failed > count // 2
