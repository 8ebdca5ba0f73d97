"""What changes hands with a turn, what ranks share, and what neither reads without need."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import _C as core
from torch._ops import _OpNamespace

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.calls import group
from gpusim.torch.distributed.own import generators, turns
from tests.oracles.machine_time import until

legacy: Any = np.random  # the global generator


def test_normal_numbers_that_are_left_over_belong_to_the_rank() -> None:
    """random.gauss and NumPy's randn make two numbers at once, and use the second without a draw
    that would change the rest of the state."""

    def alone(rank: int) -> list[float]:
        random.seed(rank)
        legacy.seed(rank)
        return [draw() for _ in range(5) for draw in (lambda: random.gauss(0, 1), legacy.randn)]

    def body(rank: int) -> list[float]:
        dist.init_process_group()
        random.seed(rank)
        legacy.seed(rank)
        found = []
        for _ in range(5):
            found.append(random.gauss(0, 1))
            dist.barrier()
            found.append(legacy.randn())
            dist.barrier()
        return found

    before = random.getstate(), legacy.get_state()
    try:
        assert launch(body, 3) == [alone(rank) for rank in range(3)]
    finally:
        random.setstate(before[0])
        legacy.set_state(before[1])


def test_states_are_swapped_without_asking_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's takes 10 us and NumPy's 100, of which a turn has none to spare."""
    asked: list[int] = []

    def body(rank: int) -> None:
        dist.init_process_group()
        for _ in range(3):
            random.random(), legacy.randn(), torch.rand(1)
            dist.barrier()

    for owner, names in (
        (random, ("getstate", "setstate")),
        (legacy, ("get_state", "set_state")),
        (torch, ("get_rng_state", "set_rng_state")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, lambda *given: asked.append(1))
    launch(body, 3)
    assert not asked and all(generators.IN_MEMORY)


def test_hooks_belong_to_the_rank_that_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no rank has one, the turn exchanges no containers of hooks; then each has its own."""
    from torch.nn.modules import module

    monkeypatch.setattr(module, "_global_forward_hooks", OrderedDict())
    before: Any = module._global_forward_hooks

    def body(rank: int) -> list[list[int]]:
        dist.init_process_group()
        layer = torch.nn.Identity()
        called: list[int] = []
        seen: list[list[int]] = []

        def look() -> None:
            called.clear()
            dist.barrier()
            layer(torch.ones(1))
            seen.append(called.copy())
            dist.barrier()

        def add(number: int) -> Any:
            return module.register_module_forward_hook(lambda *call: called.append(number))

        look()
        first = add(rank) if rank in (1, 2) else None
        look()
        second = add(10) if rank == 2 else None
        if rank == 1 and first is not None:
            first.remove()
        look()
        if rank == 2 and first is not None and second is not None:
            first.remove()
            second.remove()
        if rank == 0:
            add(20)  # it is still there at the end
        look()
        return seen

    assert launch(body, 4) == [
        [[], [], [], [20]],
        [[], [1], [], []],
        [[], [2], [2, 10], []],
        [[], [], [], []],
    ]
    assert module._global_forward_hooks is before and not before


def test_states_of_torch_that_no_rank_changes_are_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also not set; and each draw, also of the second of two normal numbers, is seen."""
    state = torch.get_rng_state
    calls: list[int] = []

    def get_rng_state() -> torch.Tensor:
        calls.append(1)
        return state()

    monkeypatch.setattr(torch, "get_rng_state", get_rng_state)

    def body(rank: int) -> tuple[int, list[float]]:
        dist.init_process_group()
        torch.manual_seed(rank)
        dist.barrier()
        first = len(calls)
        for _ in range(20):
            dist.barrier()
        read = len(calls) - first
        drawn = []
        for _ in range(3):
            drawn.append(torch.randn(1).item())
            dist.barrier()
            drawn.append(torch.randn((), dtype=torch.float64).item())
            dist.barrier()
        return read, drawn

    def alone(rank: int) -> list[float]:
        torch.manual_seed(rank)
        draws = ((1, torch.float32), ((), torch.float64)) * 3
        return [torch.randn(shape, dtype=dtype).item() for shape, dtype in draws]

    before = torch.get_rng_state()
    try:
        found = launch(body, 3)
        assert [drawn for _, drawn in found] == [alone(rank) for rank in range(3)]
        assert max(read for read, _ in found) <= 3
    finally:
        torch.set_rng_state(before)


def test_generators_that_are_not_in_memory_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(rank: int) -> list[float]:
        dist.init_process_group()
        found = []
        for _ in range(3):
            found += [random.random(), random.gauss(0, 1), torch.rand(1).item(), legacy.randn()]
            dist.barrier()
        return found

    expected = launch(body, 3)
    assert all(generators.IN_MEMORY)  # on CPython
    monkeypatch.setattr(turns, "GENERATORS", generators.ASKED)
    assert launch(body, 3) == expected


def test_the_environment_of_c_follows_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a rank sets, changes, deletes and sets again are those that C sees."""
    monkeypatch.setenv("EVERYONES", "before")
    monkeypatch.setenv("DELETED", "before")
    names = ("RANK", "EVERYONES", "DELETED", "OWN")
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p

    def seen() -> tuple[list[str | None], list[str | None]]:
        c = [getenv(name.encode()) for name in names]
        return [os.environ.get(name) for name in names], [v and v.decode() for v in c]

    def body(rank: int) -> list[Any]:
        dist.init_process_group()
        found = []

        def look() -> None:
            dist.barrier()
            found.append(seen())

        look()
        if rank == 1:
            os.environ["EVERYONES"] = "mine"
            os.environ["OWN"] = "new"
            del os.environ["DELETED"]
        look()
        if rank == 1:
            os.environ["DELETED"] = "again"
            os.environ.pop("OWN")
            del os.environ["EVERYONES"]
        look()
        return found

    for rank, found in enumerate(launch(body, 3)):
        expected: list[list[str | None]] = [[str(rank), "before", "before", None]] * 3
        if rank == 1:
            expected[1:] = [["1", "mine", None, "new"], ["1", None, "again", None]]
        assert found == [(values, values) for values in expected]
    assert seen() == ([None, "before", "before", None],) * 2


def test_an_all_gather_copies_once_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once for each pair of ranks: 256 ranks have 65,536."""
    copies: list[int] = []
    move = group.move

    def counted(pairs: Any) -> None:
        copies.append(len(pairs))
        move(pairs)

    def body(rank: int) -> list[float]:
        dist.init_process_group()
        out = torch.full((16,), -1.0)
        out[2 * rank : 2 * rank + 2] = rank  # in place, as FSDP2 does
        dist.all_gather_into_tensor(out, out[2 * rank : 2 * rank + 2])
        found: list[float] = out.tolist()
        return found

    monkeypatch.setattr(group, "move", counted)
    assert launch(body, 8) == [[float(i // 2) for i in range(16)]] * 8
    assert sum(copies) == 15


@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_ranks_share_weights_that_never_change(schedule: str) -> None:
    """As docs/torch-distributed.md says: loaded once, and assigned in each rank."""
    weights = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}
    before = {name: value.clone() for name, value in weights.items()}

    def body(rank: int) -> tuple[int, list[float]]:
        dist.init_process_group()
        with torch.device("meta"):
            frozen = torch.nn.Linear(3, 2)
        frozen.load_state_dict(weights, assign=True)
        frozen.requires_grad_(False)
        head = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        head(frozen(torch.full((1, 3), float(rank)))).sum().backward()
        optimizer.step()
        assert all(parameter.grad is None for parameter in frozen.parameters())
        return frozen.weight.data_ptr(), next(head.parameters()).flatten().tolist()

    found = launch(body, 4, schedule=schedule)
    assert {pointer for pointer, _ in found} == {weights["weight"].data_ptr()}
    assert all(trained == found[0][1] for _, trained in found)
    assert all(torch.equal(weights[name], before[name]) for name in weights)


def test_ranks_that_run_freely_get_the_same_operators() -> None:
    """Of two that are made at once, one is freed, whose address torch may have kept."""
    names = {name for name in core._dispatch_get_all_op_names() if name.startswith("aten::")}
    wanted = [name[6:] for name in sorted(names) if "." not in name]

    def body(rank: int) -> list[Any]:
        dist.init_process_group()
        dist.barrier()
        return [getattr(operators, name).default for name in wanted]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(3):
            operators = _OpNamespace("aten")
            first, *others = launch(body, 3, schedule="free")
            assert len(first) > 500
            for own in others:
                assert all(one is other for one, other in zip(first, own, strict=True))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_results_are_in_no_cycle(schedule: str) -> None:
    def body(rank: int) -> torch.Tensor:
        dist.init_process_group()
        x = torch.ones(1000)
        dist.all_reduce(x)
        return x

    gc.disable()
    try:
        watched = [weakref.ref(x) for x in launch(body, 3, schedule=schedule)]
        # A thread may yet leave its last frame.
        assert until(lambda: [each() is None for each in watched] == [True] * 3)
    finally:
        gc.enable()


def test_a_call_that_was_seen_to_be_complete_is_not_held() -> None:
    """Nor are its tensors, for a program that asks instead of waiting."""

    def body(rank: int) -> list[bool]:
        dist.init_process_group()
        alive = []
        for _ in range(3):
            x = torch.ones(2)
            work = dist.all_reduce(x, async_op=True)
            while not work.is_completed():
                pass
            alive.append(weakref.ref(work))
            assert x.tolist() == [3.0, 3.0]
            del work
        return [each() is not None for each in alive]

    assert launch(body, 3) == [[False] * 3] * 3
