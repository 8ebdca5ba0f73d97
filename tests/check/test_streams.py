"""Streams that the CPU plays: accesses in no order are named, and waits of every kind are seen."""

from __future__ import annotations

import inspect
import io
import shutil
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import cuda, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import Check, Finding
from gpusim.torch.distributed.checks.accesses import Memory, Place, access_to, meet
from gpusim.torch.distributed.checks.clocks import Clocks
from gpusim.torch.distributed.checks.log import Log
from gpusim.torch.distributed.own.threads import own_rank

Program = Callable[[], object]
WRONG: list[Program] = []
RIGHT: list[Program] = []


def wrong(program: Program) -> Program:
    """Add a program with a race at the line that ends with `# race`."""
    WRONG.append(program)
    return program


def right(program: Program) -> Program:
    """Add a program without a race."""
    RIGHT.append(program)
    return program


def checked(program: Program, ranks: int = 2, **more: Any) -> Check:
    def run(rank: int) -> None:
        cuda.set_device(rank)
        dist.init_process_group("nccl")
        program()
        dist.destroy_process_group()

    check = Check("nccl")
    launch(run, ranks, device="cpu", check=check, **more)
    return check


def findings(program: Program, ranks: int = 2, **more: Any) -> list[Finding]:
    check = checked(program, ranks, **more)
    return [each for each in check.findings if each.kind == "stream-race"]


# Programs with a race


@wrong
def used_without_a_wait() -> None:
    side = cuda.Stream()
    x = torch.ones(4, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        y = x * 2
    y + 1  # race


@wrong
def made_before_the_stream() -> None:
    x = torch.ones(4, device="cuda") * 2
    with cuda.stream(cuda.Stream()):
        x + 1  # race


@wrong
def entered_as_a_block() -> None:
    x = torch.ones(4, device="cuda") * 2
    with torch.Stream(device="cuda"):
        x + 1  # race


@wrong
def event_recorded_too_early() -> None:
    side, ready = cuda.Stream(), cuda.Event()
    with cuda.stream(side):
        ready.record()
        y = torch.full((3,), 2.0, device="cuda")
    ready.wait()
    y.sum()  # race


@wrong
def event_never_recorded() -> None:
    side, ready = cuda.Stream(), cuda.Event()
    with cuda.stream(side):
        y = torch.full((3,), 2.0, device="cuda")
    cuda.current_stream().wait_event(ready)
    y.sum()  # race


@wrong
def wait_in_the_wrong_direction() -> None:
    side = cuda.Stream()
    x = torch.ones(4, device="cuda") * 2
    cuda.current_stream().wait_stream(side)
    with cuda.stream(side):
        x.mul_(2)  # race


@wrong
def overwritten_while_it_is_read() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x.clone()
    x.zero_()  # race


@wrong
def waited_for_in_another_stream() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    with cuda.stream(side):
        work.wait()
    x / 2  # race


@wrong
def posted_in_a_stream_that_has_not_waited() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda") * 2
    with cuda.stream(side):
        dist.all_reduce(x)  # race
    cuda.current_stream().wait_stream(side)


@wrong
def sent_from_a_stream_that_has_not_waited() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda") * 2
    if dist.get_rank() == 0:
        with cuda.stream(side):
            dist.send(x, 1)  # race
        side.synchronize()
    else:
        dist.recv(x, 0)


@wrong
def stepped_before_the_reduction_is_there() -> None:
    side, model = cuda.Stream(), nn.Linear(3, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for each in model.parameters():
            dist.all_reduce(each.grad)
    optimizer.step()  # race


@wrong
def hook_of_a_gradient() -> None:
    side, model = cuda.Stream(), nn.Linear(3, 1, bias=False).cuda()

    def reduce(parameter: Any) -> None:
        with cuda.stream(side):
            dist.all_reduce(parameter.grad)  # race

    model.weight.register_post_accumulate_grad_hook(reduce)
    model(torch.ones(2, 3, device="cuda")).sum().backward()
    cuda.current_stream().wait_stream(side)


@wrong
def host_reads_a_late_copy() -> None:
    x = torch.ones(4, device="cuda") * 2
    y = x.to("cpu", non_blocking=True)
    y.sum()  # race


@wrong
def host_reads_a_late_copy_to_a_buffer() -> None:
    x = torch.ones(4, device="cuda") * 2
    y = torch.empty(4, pin_memory=True)
    y.copy_(x, non_blocking=True)
    y.add(1)  # race


@wrong
def list_of_a_late_copy() -> None:
    x = torch.ones(4, device="cuda") * 2
    x.to("cpu", non_blocking=True).tolist()  # race


@wrong
def saved_before_it_is_copied() -> None:
    x = torch.ones(4, device="cuda") * 2
    state = {"x": [x.to("cpu", non_blocking=True)]}
    torch.save(state, io.BytesIO())  # race


@wrong
def host_writes_what_is_copied() -> None:
    x = torch.ones(4, pin_memory=True)
    x.to("cuda", non_blocking=True)
    x.zero_()  # race


@wrong
def item_in_another_stream() -> None:
    side = cuda.Stream()
    with cuda.stream(side):
        y = torch.ones(4, device="cuda").sum()
    y.item()  # race


@wrong
def half_of_a_buffer() -> None:
    side, x = cuda.Stream(), torch.zeros(8, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x[4:].fill_(1)
    x[:4].add_(1)
    x[3:5].add_(1)  # race


@wrong
def halves_of_columns() -> None:
    side, x = cuda.Stream(), torch.zeros(4, 8, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x[:, 4:].fill_(1)
    x[:, :5].add_(1)  # race


@wrong
def functional_collective_in_another_stream() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda") * 2
    group: Any = dist.group.WORLD
    with cuda.stream(side):
        y = functional.all_reduce(x, "sum", group)  # race
        y = functional.wait_tensor(y)
    cuda.current_stream().wait_stream(side)
    y + 1


@wrong
def another_rank_than_the_first() -> None:
    side = cuda.Stream()
    with cuda.stream(side):
        y = torch.ones(4, device="cuda")
    if dist.get_rank() == 0:
        side.synchronize()
    y + 1  # race


# Programs without


@right
def waits_for_a_stream() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda") * 2
    for _ in range(3):
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            x.mul_(2)
            dist.all_reduce(x)
        cuda.current_stream().wait_stream(side)
        x.add_(1)


@right
def waits_for_events() -> None:
    first, second, ready = cuda.Stream(), torch.Stream(device="cuda"), torch.Event(device="cuda")
    with cuda.stream(first):
        x = torch.ones(4, device="cuda")
        ready.record()
    second.wait_event(ready)
    with second:
        x.add_(1)
    done = second.record_event()
    done.wait()
    x + 1


@right
def host_waits() -> None:
    side, done = cuda.Stream(), cuda.Event()
    waits: list[Callable[[], object]] = [
        cuda.synchronize,
        torch.accelerator.synchronize,
        side.synchronize,
        side.query,
        done.synchronize,
        done.query,
        lambda: cuda.cudart().cudaDeviceSynchronize(),
    ]
    for wait in waits:
        with cuda.stream(side):
            x = torch.ones(4, device="cuda")
            y = x.to("cpu", non_blocking=True)
            done.record()
        wait()
        (x + 1, y + 1, y.tolist())
        x.add_(1)
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            x.sum().item()
        x.add_(1)


@right
def array_of_a_late_copy() -> None:
    x = torch.ones(4, device="cuda") * 2
    y = x.to("cpu", non_blocking=True).numpy()
    cuda.synchronize()
    y.sum()


@right
def another_thread_waits() -> None:
    side, done = cuda.Stream(), cuda.Event()
    with cuda.stream(side):
        y = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
        done.record()
    thread = threading.Thread(target=done.synchronize)
    thread.start()
    thread.join()
    y.sum()


@right
def waits_in_both_streams() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda")
    work = dist.all_reduce(x, async_op=True)
    with cuda.stream(side):
        work.wait()
        x + 1
    work.wait()
    x + 1


@right
def future_of_a_work() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda")
    future = dist.all_reduce(x, async_op=True).get_future()
    with cuda.stream(side):
        future.wait()
        x + 1
    future.wait()
    x + 1


@right
def calls_of_a_group_run_in_their_order() -> None:
    x, y = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    side = cuda.Stream()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        dist.all_reduce(x)
    dist.all_reduce(y)
    x + y  # NCCL's stream has run the first before the second


@right
def other_parts_of_a_buffer() -> None:
    side, x, y = cuda.Stream(), torch.zeros(8, device="cuda"), torch.zeros(4, 8, device="cuda")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        x[4:].fill_(1)
        y[:, 4:].fill_(1)
        y[:2, :4].t().fill_(1)
    x[:4].add_(1)
    y[2:, :4].add_(1)
    cuda.current_stream().wait_stream(side)
    (x.sum(), y.sum())


@right
def memory_that_is_used_again() -> None:
    side = cuda.Stream()
    for _ in range(20):
        with cuda.stream(side):
            torch.ones(64, device="cuda").mul_(2)
        torch.ones(64, device="cuda").mul_(2)
    x = torch.ones(64, device="cuda")
    with cuda.stream(side):
        size = x.untyped_storage().size()
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(size)
        x.fill_(1)


@right
def both_only_read() -> None:
    side, x = cuda.Stream(), torch.ones(4, device="cuda")
    side.wait_stream(cuda.current_stream())
    for _ in range(2):
        with cuda.stream(side):
            x + 1
        x + 1


@right
def prefetches() -> None:
    side, mean = cuda.Stream(), torch.tensor([1.0, 2.0]).cuda()
    batches = [torch.full((3, 2), float(each), pin_memory=True) for each in range(4)]
    with cuda.stream(side):
        following = batches[0].cuda(non_blocking=True).sub_(mean)
    for batch in batches[1:]:
        cuda.current_stream().wait_stream(side)
        present = following
        present.record_stream(cuda.current_stream())
        with cuda.stream(side):
            following = batch.cuda(non_blocking=True).sub_(mean)
        present.sum()


@right
def pages_that_are_not_pinned() -> None:
    x = torch.ones(4)
    y = x.to("cuda", non_blocking=True)
    x.zero_()
    x.copy_(y, non_blocking=True)
    x.sum()
    pinned = x.pin_memory()
    z = pinned.to("cuda", non_blocking=True)
    x.zero_()
    (z + 1).cpu().tolist()


@right
def backward_of_another_stream() -> None:
    side, model = cuda.Stream(), nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    static = torch.ones(2, 3, device="cuda")
    for step in range(3):
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            static.copy_(torch.full((2, 3), float(step), device="cuda"))
            x = static.requires_grad_(step == 1)
            loss = checkpoint(model, x, use_reentrant=step == 1).square().mean()
            static = static.detach()
        cuda.current_stream().wait_stream(side)
        loss.backward()
        for each in model.parameters():
            dist.all_reduce(each.grad)
        optimizer.step()
        optimizer.zero_grad()


@right
def hooks_that_wait() -> None:
    side, model = cuda.Stream(), nn.Linear(3, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def reduce(parameter: Any) -> None:
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            dist.all_reduce(parameter.grad)

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(reduce)
    for _ in range(3):
        model(torch.ones(2, 3, device="cuda")).sum().backward()
        cuda.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@right
def sharded_beside_a_stream() -> None:
    side = cuda.Stream()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).cuda()
    for each in (model[0], model[2], model):
        fully_shard(each)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        with cuda.stream(side):
            x = torch.ones(2, 4, device="cuda")
        cuda.current_stream().wait_stream(side)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@right
def offloaded_beside_a_stream() -> None:
    side = cuda.Stream()
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    for each in (model[0], model[2], model):
        fully_shard(each, offload_policy=CPUOffloadPolicy())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        with cuda.stream(side):
            x = torch.ones(2, 4, device="cuda")
        cuda.current_stream().wait_stream(side)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@right
def saved_beside_a_stream() -> None:
    side, model = cuda.Stream(), nn.Linear(4, 4).cuda()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        for each in model.parameters():
            dist.broadcast(each.data, 0)
    cuda.current_stream().wait_stream(side)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder[0])
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), io.BytesIO())
        shutil.rmtree(str(folder[0]))


@right
def replicated_in_a_stream() -> None:
    side = cuda.Stream()
    with cuda.stream(side):
        model = DistributedDataParallel(nn.Linear(4, 1).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    cuda.current_stream().wait_stream(side)
    sum(each.sum() for each in model.parameters()).item()


@right
def messages_in_a_stream() -> None:
    side, x, y = cuda.Stream(), torch.ones(4, device="cuda"), torch.empty(4, device="cuda")
    other = 1 - dist.get_rank()
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        )
        for work in works:
            work.wait()
    cuda.current_stream().wait_stream(side)
    x.copy_(y)


@right
def streams_of_other_code() -> None:
    side = cuda.ExternalStream(1 << 20)
    with cuda.stream(side):
        x = torch.ones(4, device="cuda")
    side.synchronize()
    x.add_(1)
    cuda.current_stream().wait_stream(side)
    dist.all_reduce(x)


def _line_of(program: Program) -> str:
    lines, first = inspect.getsourcelines(program)
    at = next(place for place, line in enumerate(lines) if line.rstrip().endswith("# race"))
    return f"{__file__}:{first + at}"


@pytest.mark.parametrize("program", WRONG, ids=lambda each: each.__name__)
def test_a_race_is_named(program: Program) -> None:
    found = findings(program)
    assert [each.site for each in found] == [_line_of(program)]
    assert found[0].related
    one = {"another_rank_than_the_first": [1], "sent_from_a_stream_that_has_not_waited": [0]}
    assert found[0].ranks == one.get(program.__name__, [0, 1])


@pytest.mark.parametrize("program", RIGHT, ids=lambda each: each.__name__)
def test_what_waits_is_silent(program: Program) -> None:
    assert findings(program) == []


def rank_here() -> Any:
    return own_rank()


def test_ranks_that_are_processes_have_streams_too() -> None:
    found = findings(waited_for_in_another_stream, processes=True)
    assert [(each.site, each.ranks) for each in found] == [
        (_line_of(waited_for_in_another_stream), [0, 1])
    ]
    assert findings(host_waits, processes=True) == []


def test_a_race_is_named_once_for_a_loop() -> None:
    def loop() -> None:
        side = cuda.Stream()
        for _ in range(5):
            with cuda.stream(side):
                y = torch.ones(4, device="cuda")
            y.add_(1).mul_(2)

    (found,) = findings(loop)
    assert found.seen == 5
    assert "the default stream has not waited for that stream" in found.text


def test_without_a_second_stream_operators_are_not_followed(monkeypatch: Any) -> None:
    monkeypatch.setattr("gpusim.torch.distributed.checks.streams._has_streams", lambda file: False)
    followed = []

    def single() -> None:
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        followed.append(rank_here().watch.streams.races.is_on)
        cuda.Stream()
        followed.append(rank_here().watch.streams.races.is_on)

    assert findings(single, 1) == []
    assert followed == [False, True]


def test_host_waits_are_events_of_the_log(monkeypatch: Any) -> None:
    logs: list[Log] = []
    monkeypatch.setattr(Log, "write", lambda self, folder: logs.append(self))

    def waits() -> None:
        x, side = torch.ones(4, device="cuda"), cuda.Stream()
        x.sum().item()  # there is no call to wait for
        work = dist.all_reduce(x, async_op=True)  # 0
        side.synchronize()  # which has not waited for it
        work.wait()
        x.sum().item()
        x.sum().item()  # not again
        dist.all_reduce(x)  # 1
        x.cpu()
        dist.all_reduce(x)  # 2
        dist.all_reduce(x)  # 3
        if x[0] > 0:
            dist.barrier()  # 4
        work = dist.all_reduce(x, async_op=True)  # 5
        cuda.synchronize()
        assert x[0] > 0

    checked(waits, 1)
    events = [(each[1], each[3]) for each in logs[0].events if each[0] == "host"]
    assert events == [
        ("item()", [0]),
        ("a copy to the host", [1]),
        ("item()", [2, 3]),
        ("barrier()", [4]),
        ("torch.cuda.synchronize()", [5]),
    ]


def test_clocks_are_transitive() -> None:
    clocks = Clocks()
    one, two, three = clocks.new("one"), clocks.new("two"), clocks.new("three")
    before = one.time
    clocks.wait(two, clocks.point(one))
    clocks.wait(three, clocks.point(two))
    assert clocks.clock(three)[one.key] == before < one.time
    assert two.key not in clocks.clock(one)
    clocks.host_waits(clocks.everything())
    late = clocks.new("late")
    assert clocks.clock(late)[three.key] == three.time - 1


@pytest.mark.parametrize(
    "some, other, expected",
    [
        (lambda x: x[:2], lambda x: x[2:], False),
        (lambda x: x[:3], lambda x: x[2:], True),
        (lambda x: x[:, :4], lambda x: x[:, 4:], False),
        (lambda x: x[:, :4], lambda x: x[:, 3:], True),
        (lambda x: x[::2], lambda x: x[1::2], False),
        (lambda x: x.t(), lambda x: x[3], True),
        (lambda x: x[:, 1], lambda x: x[2, 1:2].view(torch.int16), True),
        (lambda x: x[:, 1], lambda x: x[2, 2:3].view(torch.int16), False),
        (lambda x: x[:, :1].expand(4, 9), lambda x: x[:, 1:], False),
        (lambda x: x.diagonal(), lambda x: x[0, 1:], False),
    ],
)
def test_tensors_meet_where_they_share_bytes(some: Any, other: Any, expected: bool) -> None:
    x, place = torch.zeros(4, 8), Place("a.py", 1, False)
    accesses = [access_to(each(x), 1, place, "read") for each in (some, other)]
    assert all(accesses)
    assert meet(*accesses) is expected


def test_old_accesses_of_one_line_are_forgotten() -> None:
    memory, place = Memory(None, True), Place("a.py", 1, False)
    x = torch.zeros(10_000)
    for at in range(10_000):
        access = access_to(x[at : at + 1], at + 1, place, "fill_")
        assert access is not None
        memory.note(0, access, True)
    assert len(memory.writes[0]) < 5_000
    last = access_to(x, 1, place, "sum")
    assert last is not None
    ((line, first, was_write),) = memory.unordered(1, last, False, [{}])
    assert (line, first.time, was_write) == (0, 10_000, True)
    assert not list(memory.unordered(1, last, False, [{0: 10_000}]))
    assert not list(memory.unordered(0, last, True, [{}]))
