"""Other ranks see of a rank that is gone or late what c10d shows of the script's backend."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from gpusim.errors import DeadlockError
from gpusim.torch.distributed.faults.endings import Endings
from tests.oracles.machine_time import PATIENCE

from .launches import Notes, gist, launch

CLOSED = "RuntimeError: Connection closed by peer"
TIMED_OUT = "RuntimeError: Timed out waiting"
CLOSED_HERE = "RuntimeError: Application timeout"

Call = Callable[[int, int], Any]


def ones(count: int = 2) -> torch.Tensor:
    return torch.ones(count)


def ring(rank: int, ranks: int) -> None:
    operations = [
        dist.P2POp(dist.isend, ones(), (rank + 1) % ranks),
        dist.P2POp(dist.irecv, ones(), (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def rows(ranks: int) -> list[torch.Tensor]:
    return [ones() for _ in range(ranks)]


RINGS: dict[str, Call] = {
    "all_reduce": lambda rank, ranks: dist.all_reduce(ones()),
    "all_gather": lambda rank, ranks: dist.all_gather(rows(ranks), ones()),
    "all_gather_into_tensor": lambda rank, ranks: dist.all_gather_into_tensor(
        ones(2 * ranks), ones()
    ),
    "reduce": lambda rank, ranks: dist.reduce(ones(), 0),
    "reduce_scatter": lambda rank, ranks: dist.reduce_scatter(ones(), rows(ranks)),
    "reduce_scatter_tensor": lambda rank, ranks: dist.reduce_scatter_tensor(
        ones(), ones(2 * ranks)
    ),
    "barrier": lambda rank, ranks: dist.barrier(),
    "all_gather_object": lambda rank, ranks: dist.all_gather_object([None] * ranks, rank),
    "batch_isend_irecv": ring,
}
"""Calls in which a rank has connections to the ones before and behind it."""

OTHERS: dict[str, tuple[Call, set[int]]] = {
    "all_to_all": (lambda rank, ranks: dist.all_to_all(rows(ranks), rows(ranks)), {0, 1, 3}),
    "broadcast": (lambda rank, ranks: dist.broadcast(ones(), 0), {0}),
    "broadcast from 1": (lambda rank, ranks: dist.broadcast(ones(), 1), {0, 1}),
    "gather": (
        lambda rank, ranks: dist.gather(ones(), rows(ranks) if rank == 0 else None, 0),
        {0},
    ),
    "scatter": (
        lambda rank, ranks: dist.scatter(ones(), rows(ranks) if rank == 0 else None, 0),
        {0},
    ),
    "monitored_barrier": (lambda rank, ranks: dist.monitored_barrier(), {0}),
}
"""Other calls, and who of four ranks notices the end of rank 2."""

NAMES = [*RINGS, *OTHERS]


def of_call(name: str) -> Call:
    return RINGS[name] if name in RINGS else OTHERS[name][0]


@pytest.mark.parametrize("name", NAMES)
def test_those_who_need_the_dead_rank_see_a_closed_connection(name: str, tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        of_call(name)(rank, 4)
        if rank == 2:
            os._exit(0)
        notes.tried(rank, lambda: of_call(name)(rank, 4))

    launch(program, 4)
    notice = {1, 3} if name in RINGS else OTHERS[name][1]
    for rank in (0, 1, 3):
        assert notes.of(rank)[:1] == [CLOSED] if rank in notice else notes.of(rank), rank


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_end_whatever_the_call(name: str, ranks: int) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        for _ in range(3):
            of_call(name)(rank, ranks)
        dist.destroy_process_group()

    counts = launch(program, ranks)
    assert counts.well
    dead = ranks - 1
    for call in {1, counts.ranks[dead].calls}:
        endings = launch(program, ranks, f"kill rank={dead} call={call}")
        assert endings.error is None and endings.root is endings.ranks[dead], call
        for each in endings.ranks:
            alike = each.rank == dead or each.by_agent or "onnection closed" in each.message
            assert alike or not each.code, str(each)


def test_other_groups_go_on(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> Any:
        dist.init_process_group("gloo")
        survivors = dist.new_group([0, 1, 3])
        x = ones()
        notes.tried(rank, lambda: dist.all_reduce(x))
        notes.tried(rank, lambda: dist.all_reduce(x))
        y = torch.tensor([float(rank)])
        notes.tried(rank, lambda: dist.all_reduce(y, group=survivors))
        torch.save({"emergency": y}, tmp_path / f"{rank}.pt")
        return y.item()

    endings = launch(program, 4, "kill rank=2 call=2")
    # Rank 0 has no connection to rank 2 in a ring, and the others go on: it waits for its limit,
    # and they for it.
    assert [notes.of(rank) for rank in (0, 1, 3)] == [["fine"], ["fine", CLOSED], ["fine", CLOSED]]
    assert [each.by_agent for each in endings.ranks] == [True, True, False, True]

    endings = launch(program, 4, "exit rank=2 call=2 code=0")
    assert notes.of(0)[1:] == ["fine", TIMED_OUT, "fine"]
    assert endings.results == [4.0, 4.0, None, 4.0] and endings.well


def test_works_complete_with_the_error(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        x = ones()
        dist.all_reduce(x)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        work: Any = dist.all_reduce(x, async_op=True)
        for _ in range(2):
            notes.tried(rank, work.wait)
        notes.put(rank, f"{work.is_completed()} {work.is_success()}")
        notes.put(rank, gist(work.exception()))
        notes.tried(rank, lambda: work.get_future().wait())

    launch(program, 2)
    assert notes.of(0) == [CLOSED, CLOSED, "True False", CLOSED, CLOSED]


def test_works_of_messages_say_nothing(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 1:
            dist.barrier()
            os._exit(3)
        work: Any = dist.irecv(ones(), 1)
        dist.barrier()
        notes.tried(rank, work.wait)
        notes.put(rank, f"{work.is_completed()} {work.is_success()} {work.exception()}")

    launch(program, 2)
    assert notes.of(0) == [CLOSED, "False True None"]


def test_a_program_that_asks_again_and_again_sees_the_error(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        work: Any = dist.all_reduce(ones(), async_op=True)
        while not work.is_completed():
            pass
        notes.put(rank, gist(work.exception()) if work.exception() else "fine")

    launch(program, 3, "hang rank=1 call=1")
    assert {*notes.of(0), *notes.of(2)} <= {TIMED_OUT, CLOSED}
    assert TIMED_OUT in [*notes.of(0), *notes.of(2)]


def test_all_that_wait_for_a_rank_that_hangs_time_out(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
        for _ in range(3):
            notes.tried(rank, lambda: dist.all_reduce(ones()))

    endings = launch(program, 4, "hang rank=1 call=2")  # the limit is not waited for
    for rank in (0, 2, 3):
        assert notes.of(rank) == ["fine", TIMED_OUT, CLOSED_HERE]
    # All others end well: no agent would ever end rank 1, and no limit.
    assert isinstance(endings.error, DeadlockError)
    assert "rank 1 waits in the fault 'hang rank=1 call=2'" in str(endings.error)


def test_a_rank_that_is_later_than_the_limit_is_too_late(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        notes.tried(rank, lambda: dist.all_reduce(ones()))

    assert launch(program, 3, "late rank=1 call=1 seconds=59").well
    assert [notes.of(rank) for rank in range(3)] == [["fine"]] * 3
    assert launch(program, 3, "late rank=1 call=1 seconds=61").well
    assert [notes.of(rank)[1:] for rank in range(3)] == [[TIMED_OUT], [CLOSED], [TIMED_OUT]]


def test_a_late_ranks_call_is_never_complete(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        for _ in range(3):
            notes.tried(rank, lambda: dist.all_reduce(ones()))
        time.sleep(1)  # while it ends, the others would see that

    # The others have posted all calls, in vain: the late rank's is the last part of each.
    assert launch(program, 3, "late rank=1 call=1 seconds=60.5").well
    assert notes.of(1) == [CLOSED] * 3


Deferred = Callable[[int, torch.Tensor], Any]

SERVED: dict[str, tuple[Deferred, set[int]]] = {
    "all_reduce": (lambda rank, x: dist.all_reduce(x, async_op=True), set()),
    "broadcast": (lambda rank, x: dist.broadcast(x, 0, async_op=True), {1, 3}),
    "broadcast from 1": (lambda rank, x: dist.broadcast(x, 1, async_op=True), {3}),
    "gather": (
        lambda rank, x: dist.gather(x, rows(4) if rank == 0 else None, 0, async_op=True),
        {1, 3},
    ),
    "scatter": (
        lambda rank, x: dist.scatter(x, rows(4) if rank == 0 else None, 0, async_op=True),
        {1, 3},
    ),
}
"""Calls, and for which of four ranks they are complete without rank 2."""


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", SERVED)
def test_a_call_is_complete_for_those_that_the_missing_rank_owes_nothing(
    name: str, asks: bool, tmp_path: Path
) -> None:
    notes, (call, served) = Notes(tmp_path), SERVED[name]

    def program(rank: int) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        work = call(rank, ones())
        while asks and not work.is_completed():
            pass
        notes.tried(rank, work.wait)

    launch(program, 4, "hang rank=2 call=1")
    for rank in (0, 1, 3):
        assert (notes.of(rank) == ["fine"]) == (rank in served), (rank, notes.of(rank))


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_late_rank_gets_what_the_others_had(late: int) -> None:
    def program(rank: int) -> list[list[float]]:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        found = []
        for root in range(4):
            x = torch.full((3,), rank + 10.0 * root)
            dist.broadcast(x, root)
            y, row = torch.zeros(3), [ones(3) * each for each in range(4)]
            dist.scatter(y, row if rank == root else None, root)
            z = [torch.zeros(1) for _ in range(4)]
            own = torch.tensor([rank + 1.0])
            dist.gather(own, z if rank == root else None, root)
            found += [x.tolist(), y.tolist(), [each.item() for each in z] if rank == root else []]
            # The ranks that have gone on use their memory again.
            for each in (x, y, own, *row, *z):
                each.fill_(-1)
            found.append(x.tolist())
        return found

    expected = launch(program, 4).results
    assert expected[0][:2] == [[0.0] * 3] * 2 and expected[3][4:6] == [[11.0] * 3, [3.0] * 3]
    for call in range(1, 13):
        plan = f"late rank={late} call={call} seconds=30"
        endings = launch(program, 4, plan)
        assert endings.well and endings.results == expected, plan


def calls_of_nccl(rank: int) -> None:
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    try:
        for _ in range(3):
            dist.all_reduce(ones())
    except dist.DistBackendError as error:
        assert "Watchdog caught collective operation timeout" in str(error)
        raise SystemExit(9) from None


def codes(endings: Endings) -> list[int]:
    return [each.code for each in endings.ranks]


def test_nccl_sees_nothing_of_a_dead_rank() -> None:
    endings = launch(calls_of_nccl, 3, "kill rank=1 call=2")
    assert codes(endings) == [-15, -9, -15]
    assert [each.by_agent for each in endings.ranks] == [True, False, True]


def test_nccls_watchdog_ends_the_process(capfd: pytest.CaptureFixture[str]) -> None:
    endings = launch(calls_of_nccl, 3, "hang rank=1 call=2")
    assert codes(endings) == [-6, -15, -6]
    text = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, Num"
    assert text in endings.ranks[0].message and text in capfd.readouterr().err
    assert endings.ranks[0].error == "DistBackendError"


def test_nccls_waits_raise_where_they_block() -> None:
    endings = launch(calls_of_nccl, 3, "hang rank=1 call=2", TORCH_NCCL_BLOCKING_WAIT="1")
    assert codes(endings) == [9, -15, 9]


def test_nccl_without_its_watchdog_hangs() -> None:
    how = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    endings = launch(calls_of_nccl, 2, "hang rank=1 call=2", **how)
    assert isinstance(endings.error, DeadlockError)


def test_a_rank_that_leaves_early_is_no_failure_itself() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        if rank != 1:
            dist.barrier()

    endings = launch(program, 3)
    assert codes(endings) == [1, 0, 1] and endings.root is not endings.ranks[1]


@pytest.mark.parametrize(("code", "seen"), [(0, ["DistStoreError"]), (3, [])])
def test_the_making_of_a_group_waits_for_all(code: int, seen: list[str], tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        if rank == 1:
            raise SystemExit(code)
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=2))
        except dist.DistStoreError as error:
            assert str(error).startswith("wait timeout after 2000ms, keys: /default_pg/0//cpu")
            notes.put(rank, type(error).__name__)

    launch(program, 3)
    assert [notes.of(0), notes.of(2)] == [seen, seen]


def test_a_group_of_survivors_can_be_made(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> float:
        dist.init_process_group("gloo")
        notes.tried(rank, lambda: dist.all_reduce(ones()))
        group = dist.new_group([0, 1], use_local_synchronization=True)
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=group)
        return x.item()

    endings = launch(program, 3, "kill rank=2 call=1")
    assert endings.results == [3.0, 3.0, None]
    assert [notes.of(0), notes.of(1)] == [[CLOSED], [CLOSED]]


def test_survivors_can_make_a_smaller_world(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        notes.tried(rank, lambda: dist.all_reduce(ones()))
        dist.destroy_process_group()
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank // 2, world_size=2)
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
        pair = dist.new_group([1, 0])
        y = torch.tensor([float(dist.get_rank())])
        dist.broadcast(y, 1, group=pair)
        return [x.item(), y.item(), dist.get_world_size()]

    endings = launch(program, 3, "kill rank=1 call=1")
    assert [notes.of(0), notes.of(2)] == [[CLOSED], [CLOSED]]
    assert endings.results == [[4.0, 1.0, 2], None, [4.0, 1.0, 2]]


def test_a_death_at_the_end_hurts_those_that_still_call() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.barrier()
        dist.destroy_process_group()
        if rank == 1:
            os._exit(4)

    assert codes(launch(program, 3)) == [0, 4, 0]


def test_a_handler_of_sigterm_runs(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        def leave(*given: Any) -> None:
            notes.put(rank, "saved")
            raise SystemExit(6)

        signal.signal(signal.SIGTERM, leave)
        dist.init_process_group("nccl")
        dist.barrier()

    endings = launch(program, 2, "kill rank=1 call=1")
    assert notes.of(0) == ["saved"] and endings.ranks[0].by_agent


def test_a_survivor_that_waits_elsewhere_is_ended() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 0:
            os.read(os.pipe()[0], 1)
        dist.barrier()

    endings = launch(program, 2, "kill rank=1 call=1")
    assert codes(endings) == [-15, -9] and endings.ranks[0].by_agent


def test_a_process_may_end_while_its_rank_waits(capfd: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 1:
            begun = threading.Event()

            def last_words() -> None:
                begun.wait()
                print("last words", flush=True)
                os._exit(5)

            threading.Thread(target=last_words).start()
            begun.set()
        time.sleep(3600)

    endings = launch(program, 2)
    assert codes(endings) == [-15, 5] and "last words" in capfd.readouterr().out


def test_the_store_lives_on(tmp_path: Path) -> None:
    notes = Notes(tmp_path)

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        store: Any = dist.distributed_c10d._get_default_store()
        if rank == 0:
            store.set("key", "value")
            os._exit(0)
        notes.put(rank, store.get("key").decode())
        store.set_timeout(timedelta(seconds=7))
        notes.tried(rank, lambda: store.get("other"))

    assert launch(program, 2).well
    (first, second) = notes.of(1)
    assert first == "value" and second.startswith("DistStoreError: wait timeout after 7000ms, key")


def ddp(rank: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * rank).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


def fsdp(rank: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4) * rank).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


@pytest.mark.parametrize("program", [ddp, fsdp])
def test_training_ends_at_every_call(program: Callable[[int], None]) -> None:
    whole = launch(program, 3)
    assert whole.well
    for call in range(1, whole.ranks[1].calls + 1, 3):
        for kind in ("kill", "exit", "hang"):
            endings = launch(program, 3, f"{kind} rank=1 call={call}")
            assert endings.error is None and endings.happened, (kind, call)
            assert endings.root is not None and all(codes(endings)), (kind, call)


def test_the_same_each_time() -> None:
    plans = ["kill rank=1 call=3", "hang rank=2 call=2", "late rank=0 call=4 seconds=2000"]
    for plan in plans:
        seen = {repr(launch(fsdp, 3, plan)) for _ in range(5)}
        assert len(seen) == 1
