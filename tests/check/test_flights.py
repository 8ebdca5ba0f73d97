"""Async calls: programs that wait are as without the check, and those that do not are named."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import Check, flights
from tests.check.right_calls import IN_PROCESSES, PROGRAMS, drawn, reduced
from tests.check.small import (
    BOTH,
    Program,
    assert_as_without,
    assert_named,
    checked,
    needs_linux,
    places,
    started,
)
from tests.oracles.budget import FULL, slow
from tests.oracles.machine_time import PATIENCE

pytestmark = needs_linux

# ---------------------------------------------------------------- right


@pytest.fixture(autouse=True)
def few_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """`many_in_flight` posts more calls than are followed: its time grows with their square."""
    if not FULL:
        monkeypatch.setattr(flights, "MANY", 40)


@pytest.mark.parametrize("name", list(PROGRAMS))
@pytest.mark.parametrize(
    ("ranks", "processes"),
    [(2, False), (3, True), *slow((1, False), (3, False), (5, False), (1, True), (5, True))],
)
def test_a_right_program_is_as_without_the_check(name: str, ranks: int, processes: bool) -> None:
    if name in IN_PROCESSES and not processes:
        pytest.skip("ranks that are threads share the process's operators")
    assert_as_without(PROGRAMS[name], ranks, processes=processes)


@pytest.mark.parametrize("order", [0, 1, *slow(2, 3, 4)])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in IN_PROCESSES])
def test_a_right_program_is_the_same_in_other_orders(name: str, order: int) -> None:
    program = started(PROGRAMS[name], None)
    check = Check(order=order)
    assert launch(program, 3, check=check) == launch(program, 3)
    assert not check.findings, [each.lines() for each in check.findings]


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize("name", ["all_calls", "hooks", "functional_calls", "many_in_flight"])
def test_a_right_program_is_as_without_the_check_on_cores(name: str, schedule: str) -> None:
    assert_as_without(PROGRAMS[name], 3, schedule=schedule)


def test_ranks_begin_and_end_while_another_goes_through_hooks() -> None:
    """Ranks that run freely share torch's tables of hooks."""
    is_inside, has_begun = threading.Event(), threading.Event()

    class Late(Check):
        @contextmanager
        def of_rank(self, rank: Any) -> Iterator[None]:
            if rank.index == 1:
                is_inside.wait()
            with super().of_rank(rank):
                yield

    def stay(optimizer: Any, *_: Any) -> None:
        is_inside.set()
        has_begun.wait()

    def run(rank: int) -> float:
        if rank == 1:
            has_begun.set()
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], 0.5)
        weight.grad = torch.ones(1)
        optimizer.step()
        return weight.item()

    hook = register_optimizer_step_pre_hook(stay)
    try:
        found = launch(run, 2, check=Late(), schedule="free", processes=False)
    finally:
        hook.remove()
    assert found == [0.5, 0.5]


class Slow(nn.Module):
    """A module that calls a function while it is compiled."""

    def __init__(self, inside: Callable[[], object]) -> None:
        super().__init__()
        self.inside = inside

    def __prepare_scriptable__(self) -> nn.Module:
        self.inside()
        return nn.ReLU()


def test_a_rank_compiles_and_forks_while_another_compiles() -> None:
    """torch.jit.script has torch's own functions, which ranks that run freely share."""
    first, second, child_ended = threading.Event(), threading.Event(), threading.Event()
    were_alone = []

    def inside_of_first() -> None:
        first.set()
        child_ended.wait()
        were_alone.append(not second.wait(1))

    def child() -> int:
        if (pid := os.fork()) == 0:
            signal.alarm(int(PATIENCE))  # a lock of the parent's other rank is never released
            torch.jit.script(nn.ReLU())
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def run(rank: int) -> Any:
        dist.init_process_group()
        code = 0
        if rank == 0:
            compiled = torch.jit.script(Slow(inside_of_first))
        else:
            first.wait()
            code = child()
            child_ended.set()
            compiled = torch.jit.script(Slow(second.set))
        dist.all_reduce(total := compiled(torch.ones(3)))
        return code, total.tolist()

    expected = [(0, [2.0] * 3)] * 2
    assert launch(run, 2, check=True, schedule="free", processes=False) == expected
    assert were_alone == [True]


def test_the_check_leaves_no_mode_and_no_function_behind() -> None:
    """Of threads, which share the process's, also if a rank fails."""
    names = [*Tensor.__dict__, *vars(torch), *vars(torch.inference_mode)]
    before = [getattr(each, name, None) for name in names for each in (Tensor, torch)]

    def run(rank: int) -> int:
        dist.init_process_group()
        dist.all_reduce(x := drawn(rank, 3))
        y = x * 2
        dist.barrier()
        del y
        count = torch._C._len_torch_dispatch_stack()
        if rank and fails:
            raise ValueError
        return count

    for fails in (False, True):
        try:
            assert launch(run, 2, check=Check()) == [0, 0]
        except Exception as error:
            assert fails and "ValueError" in str(error)
        after = [getattr(each, name, None) for name in names for each in (Tensor, torch)]
        assert all(
            one is other or one == other
            for one, other in zip(before, after, strict=True)
            if callable(one)
        )
        assert torch._C._len_torch_dispatch_stack() == 0


@BOTH
def test_a_wait_that_fails_is_a_wait(processes: bool) -> None:
    def run(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            work = reduced(drawn(rank, 3))
            with pytest.raises(RuntimeError, match=r"[Tt]ime"):
                work.wait(timedelta(seconds=0.01))

    check = Check()
    launch(run, 2, check=check, processes=processes)
    assert {each.kind for each in check.findings} == {"uneven-calls"}


# ---------------------------------------------------------------- wrong

WRONG: dict[str, Program] = {}


def wrong(function: Program) -> Program:
    """Add a program whose lines say what is found."""
    WRONG[function.__name__] = function
    return function


@wrong
def reads_an_operator(rank: int) -> float:
    work = reduced(x := drawn(rank, 4))
    total = x.sum()  # finds: read-before-wait on all
    work.wait()
    return float(total)


@wrong
def reads_a_view(rank: int) -> Tensor:
    work = reduced(x := drawn(rank, 4, 2))
    views = x.t()[1:]
    y = views + 1  # finds: read-before-wait on all
    work.wait()
    return y


@wrong
def reads_a_part(rank: int) -> Tensor:
    x = drawn(rank, 4, 6)
    work = dist.all_reduce(x[1], async_op=True)
    y = x[:, 2].clone()  # finds: read-before-wait on all
    work.wait()
    return y


@wrong
def reads_with_numpy(rank: int) -> Any:
    work = reduced(x := drawn(rank, 4))
    y = x.numpy().sum()  # finds: read-before-wait on all
    work.wait()
    return float(y)


@wrong
def reads_as_a_list(rank: int) -> Any:
    work = reduced(x := drawn(rank, 4))
    y = x.tolist()  # finds: read-before-wait on all
    work.wait()
    return len(y)


@wrong
def reads_as_an_array(rank: int) -> Any:
    work = reduced(x := drawn(rank, 4))
    y = np.asarray(x)  # finds: read-before-wait on all
    work.wait()
    return len(y)


@wrong
def reads_a_value(rank: int) -> float:
    work = reduced(x := drawn(rank, 1))
    y = x.item()  # finds: read-before-wait on all
    work.wait()
    return y


@wrong
def prints(rank: int) -> int:
    work = reduced(x := drawn(rank, 1))
    y = f"{x}"  # finds: read-before-wait on all
    work.wait()
    return len(y)


@wrong
def reads_on_one_rank(rank: int) -> float:
    work = reduced(x := drawn(rank, 4))
    total = 0.0
    if rank == 1:
        total = float(x.sum())  # finds: read-before-wait on 1
    work.wait()
    return total + float(x.sum())


@wrong
def reads_in_a_module(rank: int) -> Tensor:
    model = nn.Linear(4, 2)
    work = reduced(x := drawn(rank, 3, 4))
    y = model(x)  # finds: read-before-wait on all
    work.wait()
    return y


@wrong
def reads_in_a_transform(rank: int) -> Tensor:
    work = reduced(x := drawn(rank, 3, 4))
    y = torch.func.vmap(torch.sum)(x)  # finds: read-before-wait on all
    work.wait()
    return y


@wrong
def reads_in_inference(rank: int) -> Tensor:
    with torch.inference_mode():
        work = reduced(x := drawn(rank, 3))
    y = x * 2  # finds: read-before-wait on all
    work.wait()
    return y


@wrong
def reads_what_is_gathered(rank: int) -> Tensor:
    whole = torch.zeros(3 * dist.get_world_size())
    work = dist.all_gather_into_tensor(whole, drawn(rank, 3), async_op=True)
    y = whole[:1] + 1  # finds: read-before-wait on all
    work.wait()
    return y


@wrong
def gives_it_to_the_next_call(rank: int) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    work = reduced(x := drawn(rank, 3))
    y = functional.all_reduce(x, "sum", group)  # finds: read-before-wait on all
    work.wait()
    return y * 1


@wrong
def reads_a_raw_functional_result(rank: int) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    x = torch.ops._c10d_functional.all_reduce(drawn(rank, 3), "sum", group.group_name)
    y = x * 2  # finds: read-before-wait on all
    return y + torch.ops._c10d_functional.wait_tensor(x)


@wrong
def reads_in_a_hook(rank: int) -> Tensor:
    leaf = drawn(rank, 3).requires_grad_()
    works = []

    def hook(gradient: Tensor) -> Tensor:
        works.append(reduced(gradient := gradient.clone()))
        return gradient / 2  # finds: read-before-wait on all

    leaf.register_hook(hook)
    leaf.sin().sum().backward()
    works[0].wait()
    assert leaf.grad is not None
    return leaf.grad


@wrong
def writes_an_output(rank: int) -> Tensor:
    work = reduced(x := drawn(rank, 4))
    x.zero_()  # finds: write-before-wait on all
    work.wait()
    return x * 1


@wrong
def writes_an_input(rank: int) -> Tensor:
    x, whole = drawn(rank, 4), torch.zeros(4 * dist.get_world_size())
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    x += 1  # finds: write-before-wait on all
    work.wait()
    return whole * 1


@wrong
def writes_what_it_sends(rank: int) -> Tensor:
    x = drawn(rank, 4)
    if rank == 0:
        work = dist.isend(x, 1)
        x[2] = 5.0  # finds: write-before-wait on 0
        work.wait()
    else:
        dist.recv(x, 0)
    return x


@wrong
def writes_with_numpy(rank: int) -> Tensor:
    """It is seen as the program waits; the line is the call's."""
    array = np.ones(4) * rank
    x = torch.from_numpy(array)
    work = dist.all_reduce(x, async_op=True)  # finds: write-before-wait on all
    array[1] = 7
    work.wait()
    return x * 1


@wrong
def writes_an_input_with_numpy(rank: int) -> Tensor:
    array = np.ones(4) * (rank + 2)
    whole = torch.zeros(4 * dist.get_world_size(), dtype=torch.float64)
    x = torch.from_numpy(array)
    work = dist.all_gather_into_tensor(whole, x, async_op=True)  # finds: write-before-wait on all
    array[1] = 7
    work.wait()
    return whole * 1


@wrong
def steps_before_the_wait(rank: int) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(2, 3)).sum().backward()
    works = [reduced(each.grad) for each in model.parameters() if each.grad is not None]
    optimizer.step()  # finds: read-before-wait on all
    for work in works:
        work.wait()
    return [each.detach() for each in model.parameters()]


@wrong
def drops_a_work(rank: int) -> None:
    dist.all_reduce(drawn(rank, 4), async_op=True)  # finds: never-waited on all
    gc.collect()
    dist.barrier()


@wrong
def keeps_a_work(rank: int) -> int:
    works = [dist.all_reduce(drawn(rank, 4), async_op=True)]  # finds: never-waited on all
    dist.barrier()
    return len(works)


@wrong
def drops_a_message(rank: int) -> None:
    if rank == 0:
        dist.isend(drawn(rank, 4), 1)  # finds: never-waited on 0
    else:
        dist.recv(torch.zeros(4), 0)


@wrong
def drops_a_barrier(rank: int) -> None:
    dist.barrier(async_op=True)  # finds: never-waited on all


@wrong
def drops_one_of_two(rank: int) -> list[Tensor]:
    first = dist.all_reduce(x := drawn(rank, 4), async_op=True)
    second = dist.all_reduce(y := drawn(rank, 4), async_op=True)  # finds: never-waited on 1
    first.wait()
    if rank == 1:
        return [x * 1]
    second.wait()
    return [x * 1, y * 1]


@wrong
def drops_a_functional_result(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    functional.all_reduce(drawn(rank, 3), "sum", group)  # finds: result-unread on all


@wrong
def two_calls_on_one_tensor(rank: int) -> Tensor:
    x = drawn(rank, 4)
    first = reduced(x)
    second = dist.all_reduce(x, async_op=True)  # finds: overlapping-buffers on all
    first.wait()
    second.wait()
    return x * 1


@wrong
def a_call_that_waits_on_one_in_flight(rank: int) -> Tensor:
    x = drawn(rank, 4)
    first = reduced(x)
    dist.all_reduce(x)  # finds: overlapping-buffers on all
    first.wait()
    return x * 1


@wrong
def two_calls_on_parts(rank: int) -> Tensor:
    x = drawn(rank, 6)
    first = reduced(x[:4])
    second = dist.all_reduce(x[3:], async_op=True)  # finds: overlapping-buffers on all
    first.wait()
    second.wait()
    return x * 1


@wrong
def gathers_over_an_input(rank: int) -> Tensor:
    size = dist.get_world_size()
    x = drawn(rank, 3 * size)
    first = dist.all_gather_into_tensor(torch.zeros(3 * size * size), x, async_op=True)
    own = drawn(rank, 3)
    second = dist.all_gather_into_tensor(x, own, async_op=True)  # finds: overlapping-buffers on all
    first.wait()
    second.wait()
    return x * 1


CASES = [(2, False), (2, True), *slow((3, False), (5, False), (3, True))]
OF_TWO = {"writes_what_it_sends", "drops_a_message", "drops_one_of_two"}
"""Programs in which two ranks have parts of their own."""


@pytest.mark.parametrize("name", list(WRONG))
@pytest.mark.parametrize(("ranks", "processes"), CASES)
def test_a_wrong_program_is_named(name: str, ranks: int, processes: bool) -> None:
    """With the line and the ranks, and nothing else is."""
    assert_named(WRONG[name], 2 if name in OF_TWO else ranks, processes=processes)


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("name", [name for name in WRONG if "numpy" not in name])
def test_a_wrong_program_is_named_in_other_orders(name: str, order: int) -> None:
    """Whether the result was there by luck makes no difference."""
    check = Check(order=order)
    launch(started(WRONG[name], None), 2, check=check)
    assert places(check.findings) == places(checked(WRONG[name])[0])


def test_outputs_have_no_values_before_the_wait() -> None:
    """NaN in floats, -1 in integers: what is read too early is wrong in every run."""

    def run(rank: int) -> Any:
        x, y = torch.ones(2), torch.ones(2, dtype=torch.int64)
        z, flags = torch.ones(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.bool)
        works = [reduced(each) for each in (x, y, z)]
        works.append(dist.broadcast(flags, 1, async_op=True))
        early = [str(each.tolist()) for each in (x, y, z)]
        for work in works:
            work.wait()
        return [early, x, y, z, flags]

    findings, found = checked(run)
    assert {each.kind for each in findings} == {"read-before-wait"}
    assert found[0] == found[1]
    assert "['[nan, nan]', '[-1, -1]', '[(nan+nanj), (nan+nanj)]']" in found[0]


def test_a_wrong_program_is_named_once_for_each_place() -> None:
    def run(rank: int) -> None:
        for _ in range(5):
            work = reduced(x := drawn(rank, 3))
            x.sum()
            x.sum()  # the call has been named
            work.wait()

    findings, _ = checked(run)
    [found] = findings
    assert (found.kind, found.seen, found.ranks) == ("read-before-wait", 5, [0, 1])
    assert found.call == "all_reduce"
    assert "posted at" in found.text and len(found.related) == 1


def test_calls_of_torchs_modules_are_not_followed() -> None:
    """They wait in ways of their own."""

    def run(rank: int) -> Any:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 1))
        model(torch.ones(2, 3) * rank).sum().backward()
        return [each.grad for each in model.parameters()]

    assert_as_without(run)


def test_a_program_that_fails_is_not_blamed_for_its_works() -> None:
    def run(rank: int) -> None:
        dist.init_process_group()
        reduced(drawn(rank, 3))
        raise ValueError("stop")

    check = Check()
    with pytest.raises(Exception, match="stop"):
        launch(run, 2, check=check)
    assert not check.findings


def test_a_call_that_the_engine_refuses_is_not_in_flight() -> None:
    def run(rank: int) -> Tensor:
        x = drawn(rank, 4)
        for call in (
            lambda: dist.all_gather_into_tensor(torch.zeros(3), x, async_op=True),
            lambda: dist.broadcast(x, 7, async_op=True),
        ):
            with pytest.raises((RuntimeError, ValueError)):
                call()
        x += 1
        return x

    assert_as_without(run, backend="gloo")
