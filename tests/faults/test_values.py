"""Bits that change in a rank's tensors: against integers and numpy's bytes, and in programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpusim.tools.cli import main
from gpusim.torch.distributed.faults.plans import Fault
from gpusim.torch.distributed.faults.values import change, operands, results
from tests.oracles.budget import budget
from tests.tools.test_torchrun import path_is_put_back, script  # noqa: F401

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, in the order of the elements."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)  # a copy of bools has 0 and 1 alone
    flat = tensor.reshape(-1).clone(memory_format=torch.contiguous_format)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of all dtypes and any strides, whose memory has more than they show."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(1, 4), max_size=3))
    count = int(np.prod(shape)) if shape else 1
    size = torch.empty((), dtype=dtype).element_size()
    seed = draw(st.integers(0, 99))
    raw = np.random.default_rng(seed).integers(0, 256, (3 + 2 * count) * size, np.uint8)
    memory = torch.from_numpy(raw & 1 if dtype == torch.bool else raw).view(dtype)
    tensor = memory[3 :: draw(st.sampled_from([1, 2]))][:count].view(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    return tensor


@settings(max_examples=budget(1000))
@given(tensors(), st.data())
def test_a_flip_changes_one_bit_of_one_element(tensor: torch.Tensor, data: st.DataObject) -> None:
    size = tensor.element_size()
    element = data.draw(st.integers(0, tensor.numel() - 1))
    bit = data.draw(st.integers(0, 8 * size - 1))
    before, whole = bytes_of(tensor), tensor.untyped_storage().tolist()
    fault = Fault("flip", rank=0, call=1, bit=bit, element=element)
    assert change(fault, [tensor]) == ""
    changed = int.from_bytes(before, sys.byteorder) ^ (1 << (8 * size * element + bit))
    assert bytes_of(tensor) == changed.to_bytes(len(before), "little")
    # Nothing else in the memory.
    assert sum(a != b for a, b in zip(whole, tensor.untyped_storage().tolist(), strict=True)) == 1
    assert change(fault, [tensor]) == ""
    assert bytes_of(tensor) == before


@settings(max_examples=budget(300))
@given(tensors(), st.data())
def test_a_nan_is_one_element(tensor: torch.Tensor, data: st.DataObject) -> None:
    element = data.draw(st.integers(0, tensor.numel() - 1))
    before = bytes_of(tensor)
    why_not = change(Fault("nan", rank=0, call=1, element=element), [tensor])
    size = tensor.element_size()
    others = [n for n in range(tensor.numel()) if n != element]
    after = bytes_of(tensor)
    assert all(before[n * size :][:size] == after[n * size :][:size] for n in others)
    if tensor.is_floating_point() or tensor.is_complex():
        assert why_not == ""
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        assert tensor.to(wide).reshape(-1)[element].isnan()
    else:
        assert why_not == "kind" and before == after


@pytest.mark.parametrize(
    ("fault", "given", "why"),
    [
        (Fault("flip", 0, call=1, bit=3), [], "none"),
        (Fault("flip", 0, call=1, bit=3, tensor=1), [torch.ones(2)], "none"),
        (Fault("flip", 0, call=1, bit=3), [torch.ones(0)], "empty"),
        (Fault("flip", 0, call=1, bit=3), [torch.ones(2, 0, 3)], "empty"),
        (Fault("flip", 0, call=1, bit=3, element=6), [torch.ones(2, 3)], "element"),
        (Fault("flip", 0, call=1, bit=16), [torch.ones(2, dtype=torch.bfloat16)], "bit"),
        (Fault("flip", 0, call=1, bit=8), [torch.ones(2, dtype=torch.bool)], "bit"),
        (Fault("flip", 0, call=1, bit=3), [torch.eye(2).to_sparse()], "layout"),
        (Fault("nan", 0, call=1), [torch.ones(2, dtype=torch.int64)], "kind"),
        (Fault("flip", 0, call=1, bit=3, tensor=1), [torch.ones(0), torch.ones(())], ""),
    ],
)
def test_where_nothing_can_change_it_says_why(fault: Fault, given: Any, why: str) -> None:
    assert change(fault, given) == why


def test_complex_numbers_have_their_real_part_first_also_if_conjugated() -> None:
    x = torch.tensor([1 + 1j])
    assert change(Fault("flip", 0, call=1, bit=63), [x.conj()]) == ""
    assert x.item() == 1 - 1j
    assert change(Fault("flip", 0, call=1, bit=31), [x]) == ""
    assert x.item() == -1 - 1j


def test_autograd_does_not_see_the_change() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * x
    version = x._version
    assert change(Fault("flip", 0, call=1, bit=30, element=1), [x]) == ""
    assert x._version == version
    y.sum().backward()  # an ordinary write would be refused here
    assert x.grad is not None and x.grad.tolist() == [2.0, x[1].item() * 2, 2.0]


def test_operands_and_results_of_calls() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    lists = {"outputs": [[a, b]], "inputs": [c], "opts": None}
    assert [t.numel() for t in operands("allgather", lists)] == [3]
    assert [t.numel() for t in results("allgather", lists)] == [1, 2]
    for method in ("allreduce", "broadcast", "reduce"):
        assert operands(method, {"tensors": [a]}) == results(method, {"tensors": [a]}) == [a]
    assert operands("send", {"tensors": [a]}) == [a] and results("send", {"tensors": [a]}) == []
    assert operands("recv", {"tensors": [a]}) == [] and results("recv", {"tensors": [a]}) == [a]
    single = {"output": a, "input": b}
    assert operands("all_to_all_single", single)[0] is b
    assert results("all_to_all_single", single)[0] is a
    assert operands("barrier", {"opts": None}) == results("barrier", {"opts": None}) == []


PROGRAM = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    def show(*tensors):
        print(*[t.tolist() for t in tensors])
    x = torch.ones(2) * (rank + 1)
    dist.all_reduce(x)                      # call 1
    show(x)
    y = torch.ones(2) * (rank + 1)
    gathered = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(gathered, y)            # call 2
    show(y, *gathered)
    z = torch.ones(2) * (rank + 1)
    work = dist.all_reduce(z, async_op=True)  # call 3
    work.wait()
    show(z)
    n = torch.tensor([rank])
    dist.broadcast(n, 0)                    # call 4
    show(n)
    dist.barrier()                          # call 5
    dist.all_reduce(torch.ones(0))          # call 6
    if rank == 0:
        dist.send(torch.ones(1), 1)         # call 7
    else:
        m = torch.zeros(1)
        dist.recv(m, 0)                     # call 7
        show(m)
"""
PLAIN = {
    0: ["[3.0, 3.0]", "[1.0, 1.0] [1.0, 1.0] [2.0, 2.0]", "[3.0, 3.0]", "[0]"],
    1: ["[3.0, 3.0]", "[2.0, 2.0] [1.0, 1.0] [2.0, 2.0]", "[3.0, 3.0]", "[0]", "[1.0]"],
}


@pytest.mark.parametrize(
    ("plan", "changed"),
    [
        # Before it is sent: all ranks have the sum with it.
        ("flip rank=1 call=1 bit=31", {(0, 0): "[-1.0, 3.0]", (1, 0): "[-1.0, 3.0]"}),
        # On this rank alone.
        ("flip-result rank=1 call=1 bit=31 element=1", {(1, 0): "[3.0, -3.0]"}),
        # The rank's own tensor changes too.
        (
            "flip rank=1 call=2 bit=31",
            {
                (0, 1): "[1.0, 1.0] [1.0, 1.0] [-2.0, 2.0]",
                (1, 1): "[-2.0, 2.0] [1.0, 1.0] [-2.0, 2.0]",
            },
        ),
        (
            "flip-result rank=0 call=2 bit=31 tensor=1",
            {(0, 1): "[1.0, 1.0] [1.0, 1.0] [-2.0, 2.0]"},
        ),
        ("nan rank=0 call=3", {(0, 2): "[nan, 3.0]", (1, 2): "[nan, 3.0]"}),
        ("flip-result rank=0 call=3 bit=31", {(0, 2): "[-3.0, 3.0]"}),
        ("flip rank=0 call=4 bit=4", {(0, 3): "[16]", (1, 3): "[16]"}),
        # A receiver of broadcast: it is overwritten.
        ("flip rank=1 call=4 bit=4", {}),
        ("flip-result rank=1 call=7 bit=31", {(1, 4): "[-1.0]"}),
    ],
)
def test_values_change_in_programs(
    plan: str, changed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, PROGRAM)
    assert main(["torchrun", "--ranks", "2", "--faults", plan, path]) == 0
    said = capsys.readouterr()
    for rank, lines in PLAIN.items():
        expected = [changed.get((rank, n), line) for n, line in enumerate(lines)]
        tag = f"[rank{rank}]: "
        found = [each.removeprefix(tag) for each in said.out.splitlines() if each.startswith(tag)]
        assert found == expected
    assert "did not happen" not in said.err


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ("flip rank=0 call=5 bit=1", "the call has no tensor there"),
        ("flip rank=0 call=6 bit=1", "the tensor is empty"),
        ("flip-result rank=0 call=6 bit=1", "the tensor is empty"),
        ("flip-result rank=0 call=7 bit=1", "the call has no tensor there"),
        ("flip rank=1 call=1 bit=32", "the tensor's dtype has no such bit"),
        ("nan rank=0 call=4", "the tensor's dtype has no NaN"),
        ("nan rank=0 call=8", "the rank did not come to it"),
    ],
)
def test_what_cannot_change_is_said(
    plan: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, PROGRAM)
    assert main(["torchrun", "--ranks", "2", "--faults", plan, path]) == 0
    assert f"did not happen: {plan}: {why}" in capsys.readouterr().err


DDP = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(rank)
    for step in range(6):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_the_check_finds_replicas_that_a_flip_has_made_unequal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, DDP)
    given = ["torchrun", "--ranks", "2", "--check", "--faults"]
    assert main([*given, "flip-result rank=1 call=9 bit=22", path]) == 1
    error = capsys.readouterr().err
    assert "unequal-parameters at" in error and "is not equal on ranks 0, 1" in error
    # Before the sum all ranks have the same wrong gradient: no replica differs.
    assert main([*given, "flip rank=1 call=9 bit=22", path]) == 0
    assert "no findings" in capsys.readouterr().err


FUNCTIONAL = """
    import torch, torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x = torch.full((2,), float(rank + 1))
    y = functional.all_reduce(x, "sum", dist.group.WORLD)       # call 1
    print(y.tolist())
    out, works = torch.zeros(4), []
    works.append(dist.all_gather_into_tensor(out, x, async_op=True))  # call 2
    [work.wait() for work in works]
    print(out.tolist())
    found = [None, None]
    dist.all_gather_object(found, rank)  # calls 3 and 4: sizes, bytes
    print(found)
"""


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("flip rank=0 call=1 bit=31", ["[1.0, 3.0]", None, "[0, 1]"]),
        ("flip-result rank=0 call=1 bit=31", ["[-3.0, 3.0]", None, "[0, 1]"]),
        ("flip-result rank=0 call=2 bit=31 element=3", [None, "[1.0, 1.0, 2.0, -2.0]", "[0, 1]"]),
    ],
)
def test_functional_and_asynchronous_calls(
    plan: str, expected: list[str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, FUNCTIONAL)
    plain = ["[3.0, 3.0]", "[1.0, 1.0, 2.0, 2.0]", "[0, 1]"]
    assert main(["torchrun", "--ranks", "2", "--only-rank", "0", "--faults", plan, path]) == 0
    captured = capsys.readouterr()
    found = [line for line in captured.out.splitlines() if line.startswith("[")]
    assert found == [one or other for one, other in zip(expected, plain, strict=True)]
    assert "did not happen" not in captured.err
