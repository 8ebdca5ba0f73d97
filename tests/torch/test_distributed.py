"""torch.distributed on simulated ranks, against real gloo processes, and what wrong programs do."""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Shard

import gpusim
from gpusim import CollectiveMismatchError, DeadlockError, GpusimError, Reduction, ReplicaError
from gpusim.torch.distributed import FoldCall, launch, private
from gpusim.torch.distributed.own.seeds import seeds_of, sow
from tests.oracles.budget import FULL, budget, seeds
from tests.oracles.machine_time import until
from tests.torch.distributed_programs import PROGRAMS, start
from tests.torch.gloo_ranks import Case, Found, gloo

legacy: Any = np.random  # the global generator
SIZES = [1, 2, 7, 33, 147, 1000]
DTYPES = ["float32", "float64", "bfloat16", "float16", "int64", "int32", "uint8"]

HOOKS = [
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "fp16_compress_wrapper",
    "bf16_compress_wrapper",
    "powerSGD_hook",
]

CASES: list[Case] = [
    (
        "collectives",
        3,
        {"sizes": [1, 7, 147], "dtypes": ["float32", "bfloat16", "int64"], "seed": 1},
    ),
    ("groups", 3, {"seed": 0}),
    ("messages", 3, {"seed": 0}),
    ("ddp", 2, {"seed": 0, "dropout": 0.3}),
    ("ddp_hook", 3, {"seed": 0, "hook": "fp16_compress_hook"}),
    ("hooked_means", 3, {"seed": 0, "hook": "bf16_compress_hook", "sizes": [1, 4001]}),
    ("hybrid_means", 4, {"seed": 0, "replicas": 2, "sizes": [33]}),
    ("fsdp2", 3, {"seed": 0, "low": "bfloat16"}),
    ("autocast", 3, {"seed": 0, "meet": True}),
    ("redistributed", 4, {"seed": 2, "shape": [2, 2]}),
    ("contexts", 3, {}),
    ("planned", 2, {"seed": 0, "checkpoint": "planned"}),
    ("variants", 3, {}),
    ("subgroups", 3, {"seed": 0}),
    ("parallel_loss", 2, {"seed": 0}),
    ("mixture", 2, {"seed": 4}),
    ("mixture", 3, {"seed": 9}),
]
"""Those of the default run."""


def busy_threads() -> int:
    """The number of gpusim's threads, without those that are kept for the next launch."""
    return sum(thread.name.startswith("gpusim") for thread in threading.enumerate())


def case_name(case: Case) -> str:
    name, ranks, arguments = case
    return f"{name}-{ranks}-{'-'.join(f'{k}={v}' for k, v in arguments.items())}".replace(" ", "")


def located(case: Case, folder: Path) -> Case:
    """The case with its checkpoints in a folder."""
    name, ranks, arguments = case
    if "checkpoint" in arguments:
        arguments = {**arguments, "checkpoint": str(folder / arguments["checkpoint"])}
    return name, ranks, arguments


def assert_equal_bits(real: Found, ours: Found, case: str = "") -> None:
    for rank, (expected, found) in enumerate(zip(real, ours, strict=True)):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            mine = found[name]
            assert (value.shape, value.dtype) == (mine.shape, mine.dtype), (case, rank, name)
            bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (value, mine)]
            assert torch.equal(*bits), (case, rank, name)


def run(case: Case, folder: Path, **options: Any) -> Found:
    name, ranks, arguments = located(case, folder)
    options = {"reduction": "gloo-ring", **options}
    return launch(lambda rank: PROGRAMS[name](**arguments), ranks, **options)


def real(cases: list[Case], folder: Path) -> list[Found]:
    """Return the results of the ranks of real processes."""
    folder.mkdir()
    return gloo([located(case, folder) for case in cases], folder)


def test_bits_are_those_of_real_processes(tmp_path: Path) -> None:
    """Of all programs, whatever runs their ranks: test_distributed_bits.py."""
    for case, expected in zip(CASES, real(CASES, tmp_path / "real"), strict=True):
        assert_equal_bits(expected, run(case, tmp_path), case_name(case))


@pytest.mark.parametrize(
    "case",
    [
        *((name, 4, {"seed": 3}) for name in ("ddp", "fsdp2", "messages", "groups", "functional")),
        ("collectives", 4, {"sizes": SIZES, "dtypes": ["float32"], "seed": 3}),
    ],
    ids=case_name,
)
def test_free_threads_have_the_same_bits(case: Case, tmp_path: Path) -> None:
    """In programs that draw from no global generator."""
    assert_equal_bits(run(case, tmp_path), run(case, tmp_path, schedule="free"))


def test_runs_with_dropout_repeat(tmp_path: Path) -> None:
    case: Case = ("ddp", 4, {"seed": 1, "dropout": 0.5})
    first = run(case, tmp_path)
    for _ in range(20 if FULL else 4):
        assert_equal_bits(first, run(case, tmp_path))


def test_casts_that_are_lost_are_said() -> None:
    """Rank 0 comes back to autocast with other weights while rank 1 waits inside."""

    def program(rank: int) -> None:
        start()
        layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                before = layer(x)
                if rank:
                    dist.recv(torch.empty(1), 0)
            if not rank:
                with torch.no_grad():
                    layer.weight += 1
                with torch.autocast("cpu", torch.bfloat16):
                    assert not torch.equal(before, layer(x))
                dist.send(torch.ones(1), 1)

    with pytest.warns(RuntimeWarning, match="entered torch.autocast again while others waited"):
        launch(program, 2)


# What belongs to a rank


def test_each_rank_has_the_state_of_a_process() -> None:
    before = (os.getcwd(), list(sys.argv), torch.initial_seed(), dict(os.environ))
    expected = []
    for rank in range(3):
        sow(seeds_of(0, rank))
        expected.append([torch.rand(1).item(), legacy.randn(), legacy.randn(), random.random()])
    torch.manual_seed(5)
    legacy.seed(6)
    own = [torch.rand(1).item(), legacy.randn()]
    torch.manual_seed(5)
    legacy.seed(6)

    def program(rank: int) -> list[float]:
        start()
        os.environ["OWN"] = str(rank)
        sys.argv = ["program", str(rank)]
        os.chdir("/" if rank else "/tmp")
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        torch.use_deterministic_algorithms(rank == 1)
        drawn: list[float] = []
        dist.barrier()
        for draw in (lambda: torch.rand(1, dtype=torch.float32).item(), legacy.randn):
            drawn.append(draw())
            dist.barrier()
        drawn += [legacy.randn(), random.random()]
        dist.barrier()
        assert os.environ["OWN"] == os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == "3"
        assert sys.argv == ["program", str(rank)]
        assert os.getcwd() == ("/" if rank else "/tmp")
        assert torch.zeros(1).dtype == (torch.float64 if rank else torch.float32)
        assert torch.are_deterministic_algorithms_enabled() == (rank == 1)
        assert os.popen("echo $OWN").read().strip() == str(rank)
        return drawn

    assert launch(program, 3) == expected
    after = (os.getcwd(), list(sys.argv), torch.initial_seed(), dict(os.environ))
    assert before[0] == after[0] and before[1] == after[1] and before[3] == after[3]
    assert torch.zeros(1).dtype == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert [torch.rand(1).item(), legacy.randn()] == own


def test_contexts_of_dtensor_belong_to_the_rank() -> None:
    """torch keeps the operators of loss_parallel once for a process; ranks interleave inside."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel

    before = private.dispatcher._custom_op_handlers
    entered = (*before,)

    def program(rank: int) -> None:
        start()
        mesh = dist.init_device_mesh("cpu", (3,))
        logits = distribute_tensor(torch.arange(12.0).reshape(2, 6), mesh, [Shard(1)])
        if rank == 1:  # outside, while the others are inside
            dist.barrier()
            assert (*private.dispatcher._custom_op_handlers,) == entered
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                logits + torch.ones(2, 6)
            dist.barrier()
        else:
            with loss_parallel(), implicit_replication():
                dist.barrier()
                assert len(private.dispatcher._custom_op_handlers) > len(entered)
                logits + torch.ones(2, 6)
                dist.barrier()
        with loss_parallel():
            loss = F.cross_entropy(logits, torch.tensor([1, 2]))
            dist.barrier()
        plain = F.cross_entropy(logits.full_tensor(), torch.tensor([1, 2]))
        torch.testing.assert_close(loss.full_tensor(), plain)

    launch(program, 3)
    assert private.dispatcher._custom_op_handlers is before and (*before,) == entered


def test_nothing_of_a_launch_is_left() -> None:
    world, hook = dist.distributed_c10d._world, sys.excepthook
    threads = busy_threads()
    launch(lambda rank: start() and None, 4)
    assert dist.distributed_c10d._world is world
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    assert until(lambda: busy_threads() <= threads)


def test_launch_arguments() -> None:
    assert launch(lambda rank, a, b: (rank, a, b), 2, (5, "x")) == [(0, 5, "x"), (1, 5, "x")]
    with pytest.raises(TypeError, match="launch needs a function"):
        launch(3, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks=0: expected an integer from 1"):
        launch(print, 0)
    with pytest.raises(ValueError, match="schedule='quick': expected one of"):
        launch(print, 2, schedule="quick")
    with pytest.raises(ValueError, match="reduction='nope': expected an order"):
        launch(print, 2, reduction="nope")
    with pytest.raises(ValueError, match="expected op='sum'"):
        launch(print, 2, reduction=Reduction(op="max"))
    with pytest.raises(GpusimError, match="another launch is running"):
        launch(lambda rank: launch(print, 2), 2)


def test_pmap_runs_in_a_rank() -> None:
    def program(rank: int) -> list[float]:
        start()
        mapped = gpusim.pmap(lambda x: gpusim.lax.psum(x, "i"), "i")(np.arange(3.0) + rank)
        x = torch.from_numpy(np.array(mapped))
        dist.all_reduce(x)
        return x.tolist()

    assert launch(program, 2) == [[9.0] * 3] * 2


# Numerics


def total(reduction: Any, values: list[Tensor], op: Any = dist.ReduceOp.SUM) -> Tensor:
    def program(rank: int) -> Tensor:
        start()
        x = values[rank].clone()
        dist.all_reduce(x, op)
        return x

    found = launch(program, len(values), reduction=reduction)
    assert all(torch.equal(found[0], each) for each in found)
    return found[0]


@pytest.mark.parametrize(
    "order", ["linear", "reverse", "tree", "ring", "exact", "mpich", "nccl-ring"]
)
def test_sums_are_gpusims(order: str) -> None:
    values = [torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    arrays = [value.numpy() for value in values]
    reduction = Reduction(order=order)
    expected = gpusim.collectives.psum(arrays, reduction=reduction).value
    assert np.array_equal(total(reduction, values).numpy(), expected)
    assert np.array_equal(total(order, values).numpy(), expected)
    with gpusim.reduction(order=order):
        assert np.array_equal(total(None, values).numpy(), expected)


def test_a_function_chooses_the_reduction() -> None:
    told: list[FoldCall] = []

    def choose(call: FoldCall) -> str:
        told.append(call)
        return "tree" if call.group == (0, 1, 2) else "reverse"

    values = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)

    def program(rank: int) -> list[Tensor]:
        start()
        pair = dist.new_group([1, 2])
        other = dist.new_group(None, pg_options=Reduction(order="ring"))
        found = []
        for group in (dist.group.WORLD, other, pair if rank else None):
            x = torch.from_numpy(values[rank].copy())
            if group is not None:
                dist.all_reduce(x, group=group)
            found.append(x)
        return found

    found = launch(program, 3, reduction=choose)[1]
    for x, order, members in zip(found, ("tree", "ring", "reverse"), (3, 3, 2), strict=True):
        rows = values if members == 3 else values[1:]
        expected = gpusim.collectives.psum(rows, reduction=Reduction(order=order)).value
        assert np.array_equal(x.numpy(), expected)
    assert FoldCall("all_reduce", (0, 1, 2), "float32", 160) in told


def test_stochastic_rounding_draws_anew_at_each_call() -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        start()
        x, y = (torch.full((1000,), 1 + 2**-9, dtype=torch.bfloat16) for _ in range(2))
        dist.all_reduce(x)
        dist.all_reduce(y)
        return x, y

    reduction = Reduction(accumulate="bfloat16", rounding="stochastic", seed=3)
    (x, y), (x2, y2) = launch(program, 2, reduction=reduction)
    assert torch.equal(x, x2) and torch.equal(y, y2) and len(x.unique()) == 1
    half = [torch.full((1000,), 1.0078125 * (1 + i), dtype=torch.bfloat16) for i in range(2)]
    assert len(total(reduction, half).unique()) <= 2


def test_a_twin_refuses_what_it_does_not_know() -> None:
    def program(rank: int) -> None:
        start()
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))

    message = "order of mpich's reduce_scatter is not known; it is for gloo-ring, nccl-ring"
    with pytest.raises(ReplicaError, match=message):
        launch(program, 2, reduction="mpich")
    with pytest.raises(ReplicaError, match="float8_e5m2"):
        total("nccl-ring", [torch.ones(3).to(torch.float8_e5m2)] * 2)


def test_nccl_scatters_by_the_ranks_slices() -> None:
    values = np.random.default_rng(1).standard_normal((4, 4, 30)).astype(np.float32)

    def program(rank: int) -> Tensor:
        start()
        out = torch.empty(30)
        dist.reduce_scatter_tensor(out, torch.from_numpy(values[rank].copy()).reshape(-1))
        return out

    for rank, found in enumerate(launch(program, 4, reduction="nccl-ring")):
        expected = values[(rank + 1) % 4, rank]
        for number in range(2, 5):
            expected = expected + values[(rank + number) % 4, rank]
        assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("order", ["nccl-ring", "nccl-tree"])
def test_nccl_reduces_by_a_chain_that_ends_at_the_root(order: str) -> None:
    values = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 30)).astype("f4"))

    def program(rank: int) -> Tensor:
        start()
        x = values[rank].clone()
        dist.reduce(x, 1)
        return x

    found = launch(program, 4, reduction=order)[1]
    assert torch.equal(found, ((values[2] + values[3]) + values[0]) + values[1])


@pytest.mark.parametrize("order", ["nccl-ring", "nccl-tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nccl_multiplies_before_it_adds_a_mean(order: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(50, generator=generator).to(dtype) for _ in range(3)]
    third = torch.tensor(1 / 3, dtype=dtype)
    mean = total(order, values, dist.ReduceOp.AVG)
    assert torch.equal(mean, total(order, [value * third for value in values]))
    assert not torch.equal(mean, total(order, values) / 3)


FACTORS = [0.3, *(torch.tensor(x, dtype=torch.float64) for x in (0.3, [0.3]))]


@pytest.mark.parametrize("order", ["linear", "ring", "nccl-ring", "nccl-tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_premul_sum_multiplies_each_ranks_input(order: str, dtype: torch.dtype) -> None:
    def program(rank: int, factor: Any) -> list[Tensor]:
        start()
        if isinstance(factor, Tensor):
            factor = factor.to(dtype)
        x = torch.randn(6, generator=torch.Generator().manual_seed(rank)).to(dtype)
        op = dist.ReduceOp.SUM
        if factor is None:  # by hand
            x *= torch.tensor(0.3, dtype=dtype)
        else:
            op = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
        before = x.clone()
        all_reduced, reduced, coalesced = x.clone(), x.clone(), x.clone()
        outs = [torch.empty(2, dtype=dtype) for _ in range(3)]
        dist.all_reduce(all_reduced, op)
        dist.reduce(reduced, 2, op)
        dist.reduce_scatter_tensor(outs[0], x, op)
        dist.reduce_scatter(outs[1], list(x.chunk(3)), op)
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(coalesced, op)
        with dist.distributed_c10d._coalescing_manager():
            dist.reduce_scatter_tensor(outs[2], x, op)
        assert torch.equal(x, before)
        return [all_reduced, coalesced, *outs] + [reduced] * (rank == 2)

    expected = launch(program, 3, (None,), reduction=order)
    for factor in FACTORS:
        for ours, theirs in zip(
            launch(program, 3, (factor,), reduction=order), expected, strict=True
        ):
            assert all(map(torch.equal, ours, theirs))


def test_premul_sum_is_refused_where_nccl_or_the_twin_has_none() -> None:
    def program(rank: int, x: Tensor, factor: Any) -> None:
        start()
        dist.all_reduce(x.clone(), dist.ReduceOp.PREMUL_SUM(factor))  # type: ignore[operator]

    for x, factor, said in (
        (torch.ones(2, dtype=torch.int64), 0.5, "PREMUL_SUM is for float16.*got torch.int64"),
        (X, torch.tensor(0.5, dtype=torch.float64), "one element of torch.float32; got float64"),
    ):
        fails(program, 2, ReplicaError, said, args=(x, factor))
    fails(program, 2, ReplicaError, "gloo has no PREMUL_SUM", args=(X, 0.5), reduction="gloo-ring")


def test_fsdp2_divides_gradients_by_a_factor() -> None:
    """torch asks NCCL for a PREMUL_SUM; by a power of two no bit is lost on either way."""
    from torch.distributed.fsdp import fully_shard

    def program(rank: int, summed: bool) -> list[Tensor]:
        start()
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 5)
        fully_shard(model)
        model.set_gradient_divide_factor(8.0)
        model.set_force_sum_reduction_for_comms(summed)
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))).sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    both = [launch(program, 3, (summed,), reduction="nccl-ring") for summed in (False, True)]
    for ours, theirs in zip(*both, strict=True):
        assert all(map(torch.equal, ours, theirs))


# Wrong programs: the rank to blame is named at once, and nothing hangs


def fails(
    program: Callable[[int], Any],
    ranks: int,
    error: type[BaseException],
    *said: str,
    **options: Any,
) -> str:
    """Assert that a program ends by itself, with an error that says all this."""
    threads = busy_threads()
    with pytest.raises(error) as caught:
        launch(program, ranks, **options)
    text = str(caught.value)
    for each in said:
        assert re.search(each, text), text
    assert until(lambda: busy_threads() <= threads)
    return text


HERE = re.escape(__file__)
X = torch.ones(4)


def other_operation(rank: int) -> None:
    dist.all_reduce(X.clone()) if rank != 2 else dist.broadcast(X.clone(), 0)


def other_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + (rank == 2)))


def other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 2 else torch.float32))


def other_root(rank: int) -> None:
    dist.broadcast(X.clone(), rank // 2)


def other_operator(rank: int) -> None:
    dist.all_reduce(X.clone(), dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)


def other_strides(rank: int) -> None:
    x = torch.ones(2, 3)
    dist.all_reduce(x.reshape(3, 2) if rank == 2 else x.T)


def other_groups(rank: int) -> None:
    group = dist.new_group([1, 2] if rank == 2 else [0, 1, 2])
    dist.barrier(group)


def other_message(rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(3), 2)
    if rank == 2:
        dist.recv(torch.ones(4), 1)


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
    assert "rank 0" in text or "rank 1" in text
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


def returns_early(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(X.clone())


def waits_for_no_one(rank: int) -> None:
    if rank == 1:
        dist.recv(X.clone(), 0)


def crossed(rank: int) -> None:
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(a if rank else b)
        dist.barrier(b if rank else a)


def crossed_messages(rank: int) -> None:
    if rank < 2:
        dist.send(X, 1 - rank)
        dist.recv(X.clone(), 1 - rank)


def never_stored(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("nothing")


def asks_in_vain(rank: int) -> None:
    if rank == 1:
        work = dist.irecv(X.clone(), 0)
        while not work.is_completed():
            pass


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

    fails(program, 3, DeadlockError, "ranks 0, 2 wait in all_reduce", "rank 1 has returned", HERE)


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

    fails(subgroup, 2, ReplicaError, "rank 0.*destroyed the group at", HERE)

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


# Random programs of which one rank runs a mutation

Step = tuple[str, int, int, str]
KINDS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "barrier",
    "ring",
    "scatter",
    "all_to_all",
    "pair",
)


def random_step(draw: random.Random) -> Step:
    dtype = draw.choice(["float32", "float64"])
    return draw.choice(KINDS), draw.randrange(1, 5), draw.randrange(2), dtype


def mutated(draw: random.Random, steps: list[Step]) -> list[Step]:
    found, place = list(steps), draw.randrange(len(steps))
    kind, size, root, dtype = found[place]
    match draw.randrange(6):
        case 0:
            del found[place]
        case 1:
            found.insert(place, found[place])
        case 2:
            found.insert(draw.randrange(len(found)), found.pop(place))
        case 3:
            found[place] = (kind, size % 4 + 1, 1 - root, dtype)
        case 4:
            found[place] = (draw.choice(KINDS), size, root, dtype)
        case 5:
            found[place] = ("raise", size, root, dtype)
    return found


def take_step(step: Step, rank: int, size: int, pair: Any) -> None:
    kind, count, root, dtype = step
    x = torch.ones(count * size, dtype=getattr(torch, dtype))
    if kind == "raise":
        raise KeyError("mutation")
    if kind == "all_reduce":
        work = dist.all_reduce(x, async_op=True)
        dist.barrier()
        work.wait()
    elif kind == "broadcast":
        dist.broadcast(x, root)
    elif kind == "all_gather":
        dist.all_gather([torch.empty_like(x) for _ in range(size)], x)
    elif kind == "barrier":
        dist.barrier()
    elif kind == "ring":
        sent = dist.P2POp(dist.isend, x, (rank + 1) % size)
        received = dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % size)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
    elif kind == "scatter":
        dist.reduce_scatter_tensor(x[:count].clone(), x)
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty_like(x), x)
    elif rank < 2:
        dist.all_reduce(x, group=pair)


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
