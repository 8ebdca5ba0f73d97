"""Operands: what NCCL and gloo refuse, and memory that operands of one call share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.calls.arguments import RULES
from gpusim.torch.distributed.checks import Check, Finding
from gpusim.torch.distributed.checks.operands import REFUSALS
from tests.check.right_calls import drawn
from tests.check.small import BOTH, assert_as_without, assert_named, needs_linux

pytestmark = needs_linux


def found(
    call: Callable[[int], Any],
    engine: str = "",
    ranks: int = 2,
    backend: str | None = None,
    **more: Any,
) -> list[Finding]:
    """The findings of one call."""

    def run(rank: int) -> None:
        dist.init_process_group(backend)
        call(rank)

    check = Check(engine)
    launch(run, ranks, check=check, **more)
    return check.findings


def kinds(call: Callable[[int], Any], *args: Any, **more: Any) -> list[str]:
    return [each.kind for each in found(call, *args, **more)]


def reduce_(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    dist.all_reduce(tensor, op)
    tensor.sum() if tensor.dtype.itemsize > 1 else tensor.clone()


# ---------------------------------------------------------------- contiguity


@BOTH
def test_a_transposed_tensor_is_named(processes: bool) -> None:
    """NCCL refuses it; gloo and gpusim take its memory."""

    def run(rank: int) -> Tensor:
        x = drawn(rank, 3, 4).t()
        dist.all_reduce(x)  # finds: not-contiguous on all
        return x * 1

    [finding] = assert_named(run, 3, engine="nccl", processes=processes)
    assert "strides (1, 4)" in finding.text and "[4, 3]" in finding.text
    assert_as_without(run, 3, engine="gloo", processes=processes)


def test_a_part_on_one_rank_is_named_there() -> None:
    def run(rank: int) -> Tensor:
        x = drawn(rank, 4, 2)
        column = x[:, 0] if rank == 1 else x[:, 0].contiguous()
        parts = [torch.zeros(4) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, column)  # finds: not-contiguous on 1
        return torch.stack(parts)

    assert_named(run, 3, engine="nccl")


def test_messages_of_gloo_are_contiguous() -> None:
    def run(rank: int) -> Tensor:
        x = drawn(rank, 3, 4).t()
        if rank == 0:
            dist.send(x, 1)  # finds: not-contiguous on 0
            return x
        dist.recv(y := torch.zeros(4, 3), 0)
        return y * 1

    assert_named(run, engine="gloo")


FORMAT = torch.channels_last
LAYOUTS: list[tuple[Callable[[], Tensor], str, list[str]]] = [
    (lambda: torch.ones(2, 3, 4, 5).to(memory_format=FORMAT), "nccl", []),
    (lambda: torch.ones(1, 5).t(), "nccl", []),
    (lambda: torch.ones(0, 4).t(), "nccl", []),
    (lambda: torch.ones(6)[2:], "nccl", []),
    (lambda: torch.tensor(1.0), "nccl", []),
    (lambda: torch.ones(3, 4).t(), "gloo", []),
    (lambda: torch.ones(2, 3, 4).transpose(0, 2), "nccl", ["not-contiguous"]),
    (lambda: torch.ones(2, 3, 4, 5).to(memory_format=FORMAT)[:, :2], "nccl", ["not-contiguous"]),
]


@pytest.mark.parametrize(("make", "engine", "expected"), LAYOUTS)
def test_layouts_that_an_engine_takes(
    make: Callable[[], Tensor], engine: str, expected: list[str]
) -> None:
    def call(rank: int) -> None:
        x = make()
        if x.is_contiguous(memory_format=FORMAT if x.dim() == 4 else torch.contiguous_format):
            reduce_(x)
        elif engine == "gloo" or expected:
            parts = [torch.zeros(x.shape) for _ in range(2)]
            dist.all_gather(parts, x)
            torch.stack(parts).sum()

    assert kinds(call, engine) == expected


def test_formats_are_not_for_calls_that_cut() -> None:
    """NCCL cuts what it gathers and scatters in the order of memory."""

    def call(rank: int) -> None:
        x = torch.ones(2, 3, 4, 5).to(memory_format=FORMAT)
        dist.all_gather_into_tensor(whole := torch.zeros(4, 3, 4, 5), x)
        whole.sum()

    assert kinds(call, "nccl") == ["not-contiguous"]


def test_backends_that_refuse_it_themselves_raise_their_error() -> None:
    """A call that is refused is not named too."""

    def call(rank: int) -> None:
        with pytest.raises(ValueError, match="contiguous"):
            dist.all_reduce(torch.ones(2, 3).t())

    assert kinds(call, backend="nccl") == []


# ---------------------------------------------------------------- dtypes, operators, calls

NEITHER = [torch.int16, torch.uint16, torch.uint32, torch.uint64]
BOTH_HAVE = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("engine", ["nccl", "gloo"])
def test_dtypes_that_an_engine_has(engine: str) -> None:
    def call(rank: int) -> None:
        for dtype in BOTH_HAVE:
            x = torch.ones(3).to(dtype)
            dist.broadcast(x, 0)
            x.clone()

    assert kinds(call, engine) == []


@pytest.mark.parametrize("engine", ["nccl", "gloo"])
@pytest.mark.parametrize("dtype", NEITHER)
def test_dtypes_that_no_engine_has(engine: str, dtype: torch.dtype) -> None:
    def call(rank: int) -> None:
        x = torch.ones(3).to(dtype)
        dist.broadcast(x, 0)
        x.clone()

    [finding] = found(call, engine)
    assert finding.kind == "dtype-refused" and finding.ranks == [0, 1]
    assert f"{engine} has no {str(dtype)[6:]}; it has bfloat16, bool" in finding.text


def test_numbers_of_eight_bits_are_nccls_alone() -> None:
    def call(rank: int) -> None:
        x = torch.ones(3).to(torch.float8_e4m3fn)
        dist.broadcast(x, 0)
        x.clone()

    assert kinds(call, "nccl") == [] and kinds(call, "gloo") == ["dtype-refused"]


@pytest.mark.parametrize("name", ["BAND", "BOR", "BXOR"])
def test_operators_that_nccl_lacks(name: str) -> None:
    def call(rank: int) -> None:
        x = torch.ones(3, dtype=torch.int64)
        dist.all_reduce(x, getattr(dist.ReduceOp, name))
        x.sum()

    [finding] = found(call, "nccl")
    assert finding.kind == "dtype-refused" and f"ReduceOp.{name}" in finding.text
    assert kinds(call, "gloo") == []


def test_operators_that_gloo_lacks() -> None:
    def call(rank: int) -> None:
        x = torch.ones(4)
        dist.reduce_scatter_tensor(y := torch.zeros(2), x, dist._make_nccl_premul_sum(2.0))
        y.sum()

    assert kinds(call, "gloo") == ["dtype-refused"] and kinds(call, "nccl") == []


def test_calls_that_nccl_lacks() -> None:
    def anybody(rank: int) -> None:
        if rank == 0:
            dist.recv(x := torch.zeros(2))
            x.sum()
        else:
            dist.send(torch.ones(2), 0)

    def monitored(rank: int) -> None:
        dist.monitored_barrier()

    def sparse(rank: int) -> None:
        x = torch.eye(2).to_sparse()
        dist.all_reduce(x)
        x.to_dense()

    for call in (anybody, sparse):
        [finding] = found(call, "nccl")
        assert finding.kind == "call-refused" and finding.text.partition(": ")[2].startswith("NCCL")
        assert kinds(call, "gloo") == []
    assert kinds(monitored, "nccl", backend="gloo") == ["call-refused"]
    assert kinds(monitored, "gloo", backend="gloo") == []


def test_the_rules_are_those_of_the_backend_that_is_named() -> None:
    """The engine of the check is for all groups; without it each group's own holds."""

    def call(rank: int) -> None:
        x = torch.ones(3, 2).t()
        dist.all_reduce(x)
        x.sum()

    for backend in ("gloo", None):
        assert kinds(call, backend=backend) == []
        assert kinds(call, "nccl", backend=backend) == ["not-contiguous"]
    mixed = "cpu:gloo,cuda:nccl"  # in which tensors of the host have gloo
    assert kinds(call, backend=mixed) == kinds(call, "nccl", backend=mixed) == []


def test_calls_of_torchs_modules_are_checked_too() -> None:
    def call(rank: int) -> None:
        model = torch.nn.Linear(2, 2)
        model.weight = torch.nn.Parameter(model.weight.t())
        model.register_buffer("count", torch.zeros(1, dtype=torch.int16))
        DistributedDataParallel(model)

    assert "dtype-refused" in kinds(call, "nccl")


def test_rules_have_their_source() -> None:
    assert set(REFUSALS) == {"nccl", "gloo"} < set(RULES)
    assert all(each.source for each in REFUSALS.values())


# ---------------------------------------------------------------- devices


def on(device: str, engine: str, backend: str | None, operation: str = "all_reduce") -> list[str]:
    def call(rank: int) -> None:
        torch.cuda.set_device(rank)
        x = torch.ones(3, device=device)
        if operation == "all_reduce":
            dist.all_reduce(x)
        elif rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        x.sum()

    return kinds(call, engine, backend=backend, device="cpu")


def test_tensors_of_another_device() -> None:
    assert on("cuda", "nccl", "nccl") == on("cuda", "", "nccl") == []
    assert on("cpu", "nccl", "nccl") == on("cpu", "", "nccl") == ["device-refused"]
    assert on("cpu", "", "cpu:gloo,cuda:nccl") == on("cuda", "", "cpu:gloo,cuda:nccl") == []
    assert on("cpu", "", "gloo") == on("cuda", "", "gloo") == []
    assert on("cuda", "", "gloo", "send") == ["device-refused"] * 2
    assert on("cpu", "", "gloo", "send") == []


def test_without_played_gpus_the_host_is_any_device() -> None:
    def call(rank: int) -> None:
        reduce_(torch.ones(3))

    assert kinds(call, "nccl") == kinds(call, backend="nccl") == []


# ---------------------------------------------------------------- aliases


def right_forms(rank: int) -> list[Any]:
    """The forms that engines document, and parts beside each other."""
    size = dist.get_world_size()
    whole = torch.zeros(3 * size)
    own = slice(3 * rank, 3 * rank + 3)
    whole[own] = drawn(rank, 3)
    dist.all_gather_into_tensor(whole, whole[own])
    dist.all_gather(list(whole.chunk(size)), whole.chunk(size)[rank])
    parts = drawn(rank, 3 * size)
    dist.reduce_scatter_tensor(parts[own], parts)
    chunks = [each.clone() for each in drawn(rank, 3 * size).chunk(size)]
    dist.reduce_scatter(chunks[rank], chunks)
    gathered = list(drawn(rank, 3 * size).chunk(size))
    dist.gather(gathered[rank], gathered if rank == 0 else None, 0)
    dist.scatter(gathered[rank], gathered if rank == 0 else None, 0)
    table = drawn(rank, 2 * size, 3)
    dist.all_to_all_single(table[:size], table[size:])
    dist.all_to_all(list(torch.zeros(size, 2).unbind()), list(torch.ones(size, 2).unbind()))
    empty = torch.zeros(0)
    dist.all_to_all_single(empty, empty)
    dist.all_reduce(table)
    return [whole, parts[own] * 1, chunks[rank] * 1, gathered[rank] * 1, table]


@BOTH
@pytest.mark.parametrize("engine", ["", "nccl", "gloo"])
def test_documented_forms_are_right(engine: str, processes: bool) -> None:
    for ranks in (1, 2, 3):
        assert_as_without(right_forms, ranks, engine=engine, processes=processes)


def swaps_in_place(rank: int) -> None:
    x = drawn(rank, 2 * dist.get_world_size())
    dist.all_to_all_single(x, x)  # finds: aliased-operands on all
    x.sum()


def gathers_from_another_slice(rank: int) -> None:
    size = dist.get_world_size()
    whole = drawn(rank, 3 * size)
    after = (rank + 1) % size
    own = whole[3 * after : 3 * after + 3]
    dist.all_gather_into_tensor(whole, own)  # finds: aliased-operands on all
    whole.sum()


def gathers_into_one(rank: int) -> None:
    x = torch.zeros(3)
    parts = [x] * dist.get_world_size()
    dist.all_gather(parts, drawn(rank, 3))  # finds: aliased-operands on all
    x.sum()


def gathers_into_parts_that_overlap(rank: int) -> None:
    x = torch.zeros(2 * dist.get_world_size() + 1)
    parts = [x[2 * i : 2 * i + 3] for i in range(dist.get_world_size())]
    dist.all_gather(parts, drawn(rank, 3))  # finds: aliased-operands on all
    x.sum()


def scatters_into_another_part(rank: int) -> None:
    size = dist.get_world_size()
    x = drawn(rank, 3 * size)
    after = (rank + 1) % size
    own = x[3 * after : 3 * after + 3]
    dist.reduce_scatter_tensor(own, x)  # finds: aliased-operands on all
    own.sum()


def gathers_a_view(rank: int) -> None:
    """Of the root alone: others give no output."""
    x = drawn(rank, 4)
    parts = [x[1:], *(torch.zeros(3) for _ in range(dist.get_world_size() - 1))]
    own = x[:3]
    dist.gather(own, parts if rank == 0 else None, 0)  # finds: aliased-operands on 0
    torch.cat(parts).sum()


@BOTH
@pytest.mark.parametrize(
    "call",
    [
        swaps_in_place,
        gathers_from_another_slice,
        gathers_into_one,
        gathers_into_parts_that_overlap,
        scatters_into_another_part,
        gathers_a_view,
    ],
)
def test_operands_that_share_memory_are_named(call: Callable[[int], None], processes: bool) -> None:
    for ranks in (2, 3):
        assert_named(call, ranks, processes=processes)
