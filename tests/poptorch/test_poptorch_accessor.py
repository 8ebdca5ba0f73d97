"""poptorch.AsynchronousDataAccessor: what its worker process loads, and how it ends.

Elements arrive whole and in order, errors are told, nothing waits, and nothing stays behind.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from gpusim import poptorch
from gpusim.poptorch import DataLoaderMode, Options, SharingStrategy
from gpusim.poptorch.data import AsynchronousDataAccessor, AsynchronousWorker, DataLoader
from tests.oracles.machine_time import PATIENCE, until
from tests.oracles.owned import Owned, open_files

ROOT = Path(__file__).parents[2]
FAILED = "An error occurred in the data fetcher: "
NOT_STARTED = "AsynchronousDataAccessor worker thread failed to start (Check above for details)"


class Numbers(Dataset[torch.Tensor]):
    """0, 1, 2, ..., each after `act` was called with it."""

    def __init__(self, length: int, act: Callable[[int], object] | None = None) -> None:
        self.length, self.act = length, act

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.act is not None:
            self.act(index)
        return torch.tensor([index])


class At:
    """Does something at one index."""

    def __init__(self, index: int, action: Callable[..., Any], *arguments: Any) -> None:
        self.index, self.action, self.arguments = index, action, arguments

    def __call__(self, index: int) -> None:
        if index == self.index:
            self.action(*self.arguments)


class Count:
    """Counts, for both processes."""

    def __init__(self) -> None:
        self.shared = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __call__(self, index: int) -> None:
        self.shared += 1

    def reaches(self, number: int) -> bool:
        return until(lambda: int(self.shared) >= number)


class OwnError(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail(error: type[Exception], *arguments: Any) -> None:
    raise error(*arguments)


def kill_me(number: int) -> None:
    os.kill(os.getpid(), number)


def gone(pid: int) -> bool:
    """Whether a process is no more, or only its number is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def group(pid: int) -> list[int]:
    """A worker, and the processes that it has started."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.getpgid(int(name)) == pid and not gone(int(name)):
                found.append(int(name))
        except ProcessLookupError:
            continue
    return found


def worker_of(source: AsynchronousDataAccessor | DataLoader) -> AsynchronousWorker:
    accessor = source._accessor if isinstance(source, DataLoader) else source
    assert accessor is not None
    return accessor._worker


@pytest.fixture
def accessor() -> Iterator[Callable[..., AsynchronousDataAccessor]]:
    """Makes accessors that are ended with the test."""
    made = []

    def make(*arguments: Any, **options: Any) -> AsynchronousDataAccessor:
        made.append(AsynchronousDataAccessor(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.terminate()


def numbers(elements: Any) -> list[int]:
    return [int(element) for element in elements]


# ---------------------------------------------------------------- elements


def test_elements_arrive_in_order_in_every_epoch(accessor: Any) -> None:
    loaded = accessor(Numbers(10), buffer_size=2)
    assert len(loaded) == 10
    for _ in range(3):
        assert numbers(loaded) == list(range(10))


@pytest.mark.parametrize("strategy", list(SharingStrategy))
def test_every_strategy_brings_the_dataset_over(strategy: SharingStrategy, accessor: Any) -> None:
    whole = torch.arange(6.0)
    dataset = [whole[:3], whole[3:], torch.zeros(0), torch.ones(2, 2, dtype=torch.bfloat16)]
    loaded = list(map(torch.clone, accessor(dataset, sharing_strategy=strategy)))
    assert all(map(torch.equal, loaded, dataset))
    assert [one.dtype for one in loaded] == [one.dtype for one in dataset]
    assert whole.is_shared() == (strategy is SharingStrategy.SharedMemory)


def test_a_dataset_may_consist_of_more_tensors_than_there_are_descriptors(accessor: Any) -> None:
    views = list(torch.arange(2000).unbind())
    assert numbers(accessor(views)) == list(range(2000))


class Named(NamedTuple):
    left: torch.Tensor
    right: list[Any]


def test_structures_shapes_and_dtypes_are_kept_and_may_change(accessor: Any) -> None:
    dataset: list[Any] = [
        {"x": torch.ones(2, 3), "y": (torch.tensor(1, dtype=torch.int8), [torch.zeros(0, 4)])},
        Named(torch.tensor([True]), [torch.tensor(1 + 2j), torch.ones(2, 2).T[:, :1]]),
        (torch.full((300, 300), 7, dtype=torch.float16),),
        torch.tensor(3.0),
        [torch.arange(12).reshape(3, 4)[:, ::2]],
    ]
    for expected, element in zip(dataset, accessor(dataset, buffer_size=1), strict=True):
        flat, spec = torch.utils._pytree.tree_flatten(element)
        expected_flat, expected_spec = torch.utils._pytree.tree_flatten(expected)
        assert spec == expected_spec and type(element) is type(expected)
        for one, other in zip(flat, expected_flat, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_tensors_lie_in_shared_memory_and_are_valid_until_the_next(accessor: Any) -> None:
    loaded = accessor(Numbers(9), buffer_size=1)
    elements = iter(loaded)
    first = next(elements)
    assert first.is_shared()
    assert worker_of(loaded)._held is not None
    time.sleep(0.05)  # the worker may not write, however long it takes
    assert int(first) == 0
    second = next(elements)
    assert first.data_ptr() == second.data_ptr() and int(first) == int(second) == 1


@pytest.mark.parametrize(("early", "size", "loads"), [(False, 4, 1), (True, 4, 4), (True, 1, 1)])
def test_how_much_is_loaded_before_anybody_asks(
    early: bool, size: int, loads: int, accessor: Any
) -> None:
    count = Count()
    loaded = accessor(Numbers(20, count), buffer_size=size, early_preload=early)
    assert count.reaches(loads)
    time.sleep(0.1)
    assert int(count.shared) == loads
    next(iter(loaded))
    assert count.reaches(size)
    time.sleep(0.1)
    assert int(count.shared) == size  # the element in use is one of them


@pytest.mark.parametrize(("indefinitely", "loads"), [(True, 13), (False, 5)])
@pytest.mark.parametrize("early", [False, True])
def test_the_next_epoch_is_loaded_ahead_if_wanted(
    indefinitely: bool, loads: int, early: bool, accessor: Any
) -> None:
    count = Count()
    loaded = accessor(
        Numbers(5, count), buffer_size=8, load_indefinitely=indefinitely, early_preload=early
    )
    assert numbers(loaded) == list(range(5))
    assert count.reaches(loads)
    time.sleep(0.1)
    assert int(count.shared) == loads
    assert numbers(loaded) == list(range(5))


@pytest.mark.parametrize("persistent", [False, True])
def test_an_iteration_that_was_left_does_not_reach_into_the_next(persistent: bool) -> None:
    loader = DataLoader(
        Options(),
        Numbers(12),
        num_workers=1,
        persistent_workers=persistent,
        mode=DataLoaderMode.Async,
    )
    for stop in (1, 12, 5, 11):
        assert numbers(islice(loader, stop)) == list(range(stop))
    assert numbers(loader) == list(range(12))
    loader.terminate()


def test_next_begins_an_iteration_and_its_end_stays(accessor: Any) -> None:
    loaded = accessor(Numbers(2))
    assert (int(next(loaded)), int(next(loaded))) == (0, 1)
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(loaded)
    assert numbers(loaded) == [0, 1]


def test_an_iterator_that_is_used_up_has_one_epoch(accessor: Any) -> None:
    loaded = accessor((torch.tensor(i) for i in range(3)), sharing_strategy=SharingStrategy.Fork)
    assert [numbers(loaded) for _ in range(3)] == [[0, 1, 2], [], []]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((2,), number) for number in range(7))


def test_what_a_dataset_yields_is_rebatched_as_entries(accessor: Any) -> None:
    loaded = accessor(Stream(), rebatched_size=3)
    for _ in range(2):
        assert [batch.tolist() for batch in loaded] == [
            [[0, 0], [1, 1], [2, 2]],
            [[3, 3], [4, 4], [5, 5]],
        ]


@pytest.mark.parametrize(("drop_last", "sizes"), [(True, [4, 4]), (False, [4, 4, 2])])
def test_what_a_loader_yields_is_rebatched_as_batches(
    drop_last: bool, sizes: list[int], accessor: Any
) -> None:
    loader = DataLoader(Options(), Numbers(10), drop_last=drop_last)
    loaded = accessor(loader, rebatched_size=4)
    batches = [batch.clone() for batch in loaded]
    assert [len(batch) for batch in batches] == sizes and len(loaded) == len(sizes)
    assert torch.cat(batches).flatten().tolist() == list(range(sum(sizes)))


def test_two_of_them_can_be_read_side_by_side(accessor: Any) -> None:
    one, two = accessor(Numbers(5)), accessor(Numbers(5))
    assert [(int(a), int(b)) for a, b in zip(one, two, strict=True)] == [(i, i) for i in range(5)]


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"rebatched_size": 1},
            AssertionError,
            "rebatched_size must be None or greater than 1",
        ),
        ({"buffer_size": 0}, ValueError, "buffer_size=0: expected a number of at least 1"),
        (
            {"miss_sleep_time_in_ms": -1},
            ValueError,
            "miss_sleep_time_in_ms=-1: expected at least 0",
        ),
        ({"sharing_strategy": 4}, ValueError, "4 is not a valid SharingStrategy"),
    ],
)
def test_arguments_are_checked(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        AsynchronousDataAccessor(Numbers(3), **options)
    assert str(raised.value) == message


def test_what_cannot_be_pickled_says_what_to_do() -> None:
    class Local(Numbers):
        pass

    with pytest.raises((AttributeError, TypeError)) as raised:
        AsynchronousDataAccessor(Local(3))
    assert "SharingStrategy.Fork needs no pickling" in raised.value.__notes__[0]


# ---------------------------------------------------------------- errors


def test_what_the_dataset_raises_is_told_after_the_elements_before(accessor: Any) -> None:
    loaded = accessor(Numbers(9, At(5, fail, ValueError, "broken element")))
    found = []
    with pytest.raises(AssertionError) as raised:
        for element in loaded:
            found.append(int(element))
    assert found == list(range(5))
    error = raised.value
    assert str(error) == f"{FAILED}ValueError: broken element"
    assert isinstance(error.__cause__, ValueError) and str(error.__cause__) == "broken element"
    assert "in fail\n    raise error(*arguments)" in error.__notes__[0]
    for again in (next, iter):
        with pytest.raises(AssertionError, match="broken element"):
            again(loaded)


@pytest.mark.parametrize("error", [EOFError, BrokenPipeError, SystemExit, KeyboardInterrupt])
def test_no_error_of_the_dataset_is_taken_for_another(
    error: type[Exception], accessor: Any
) -> None:
    with pytest.raises(AssertionError) as raised:
        list(accessor(Numbers(9, At(2, fail, error, "its own"))))
    assert type(raised.value.__cause__) is error
    assert str(raised.value) == f"{FAILED}{error.__name__}: its own"


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_in_a_loader_and_its_workers_are_told(workers: int) -> None:
    loader = DataLoader(
        Options(),
        Numbers(9, At(2, fail, OwnError, 1, 2)),
        num_workers=workers,
        mode=DataLoaderMode.Async,
    )
    with pytest.raises(AssertionError, match="OwnError: 1 and 2") as raised:
        list(loader)
    assert "OwnError: 1 and 2" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("dataset", "cause", "message"),
    [
        (Numbers(5, At(0, fail, KeyError, "broken")), KeyError, "'broken'"),
        (Numbers(0), poptorch.Error, "'poptorch_py_error': The Dataset is empty"),
        (
            [(torch.zeros(1), "label")],
            AssertionError,
            "Tensor at index 1 is not a torch tensor (<class 'str'>). AsynchronousDataAccessor "
            "expects data to be organised as a flat 1D container of tensors.",
        ),
        (
            [torch.eye(2).to_sparse()],
            TypeError,
            "Tensor at index 0 is torch.sparse_coo on cpu: AsynchronousDataAccessor expects dense "
            "tensors on the CPU",
        ),
    ],
)
def test_a_worker_without_a_first_element_has_failed_to_start(
    dataset: Any, cause: type[Exception], message: str
) -> None:
    with pytest.raises(poptorch.Error) as raised:
        AsynchronousDataAccessor(dataset)
    assert raised.value.message == NOT_STARTED
    assert type(raised.value.__cause__) is cause and str(raised.value.__cause__) == message
    assert "Traceback" in raised.value.__notes__[0]


@pytest.mark.parametrize(
    ("action", "how"),
    [
        (At(3, kill_me, signal.SIGKILL), "was killed by signal 9 (SIGKILL)"),
        (
            At(3, kill_me, signal.SIGBUS),
            "was killed by signal 7 (SIGBUS); shared memory is probably full (/dev/shm)",
        ),
        (At(3, os._exit, 4), "ended with code 4"),
    ],
)
def test_a_worker_that_dies_is_told_after_its_last_element(
    action: At, how: str, accessor: Any
) -> None:
    loaded = accessor(Numbers(9, action), buffer_size=5)
    found = []
    with pytest.raises(AssertionError) as raised:
        for element in loaded:
            found.append(int(element))
    assert found == [0, 1, 2]
    assert str(raised.value) == f"{FAILED}the worker (process {worker_of(loaded).pid}) {how}"
    with pytest.raises(AssertionError, match="the worker"):
        next(loaded)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_killed_at_any_moment_hangs_nothing_and_loses_nothing_silently(
    seed: int, workers: int
) -> None:
    moment = random.Random(seed)
    loader = DataLoader(
        Options(),
        Numbers(40),
        num_workers=workers,
        mode=DataLoaderMode.Async,
        async_options={"buffer_size": moment.randint(1, 5)},
    )
    pid = worker_of(loader).pid
    killed_at = moment.randrange(100)
    found: list[int] = []
    with pytest.raises(AssertionError) as raised:
        while True:  # epochs
            for element in loader:
                found.append(int(element))
                if len(found) == killed_at:
                    time.sleep(moment.choice([0, 0.001, 0.01]))
                    os.kill(pid, signal.SIGKILL)
            if killed_at == 0:
                os.kill(pid, signal.SIGKILL)
            assert len(found) % 40 == 0  # no epoch ends early
    assert "was killed by signal 9 (SIGKILL)" in str(raised.value)
    assert found == [number % 40 for number in range(len(found))]
    assert until(lambda: not group(pid))  # what it had started is gone, too


@pytest.mark.parametrize("seed", range(2))
def test_a_worker_killed_while_it_starts_is_told(seed: int) -> None:
    delay = random.Random(seed).choice([0, 0.001, 0.005, 0.02])
    with pytest.raises(poptorch.Error) as raised:
        AsynchronousDataAccessor(Numbers(9, At(0, killed_after, delay)))
    assert raised.value.message == NOT_STARTED
    assert "was killed by signal 9 (SIGKILL)" in raised.value.__notes__[0]


def killed_after(seconds: float) -> None:
    time.sleep(seconds)
    kill_me(signal.SIGKILL)


class Gate:
    """Waits until the other process opens it."""

    def __init__(self) -> None:
        self.open = torch.zeros(1, dtype=torch.bool).share_memory_()

    def __call__(self) -> None:
        assert until(lambda: bool(self.open))


def test_an_interrupt_while_the_program_waits_loses_nothing(accessor: Any) -> None:
    gate = Gate()
    loaded = accessor(Numbers(9, At(3, gate)), buffer_size=2)
    elements = iter(loaded)
    found: list[int] = []
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        for element in elements:
            found.append(int(element))
            if len(found) == 3:  # the next one does not come
                interrupt.start()
    gate.open.fill_(True)
    found += [int(next(elements)) for _ in range(6)]
    assert found == list(range(9))


# ---------------------------------------------------------------- ends


def shared_memory(processes: list[int]) -> list[str]:
    """What of PyTorch's is named after the processes that made it."""
    beginnings = tuple(f"torch_{process}_" for process in processes)
    return [name for name in os.listdir("/dev/shm") if name.startswith(beginnings)]


def loading_ahead(workers: int = 2) -> DataLoader:
    return DataLoader(Options(), Numbers(50), num_workers=workers, mode=DataLoaderMode.Async)


@pytest.mark.parametrize("read", [0, 3, 50])
def test_terminate_leaves_neither_process_nor_memory_nor_descriptor(
    read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading_ahead().terminate()  # starts the servers that multiprocessing keeps
    gc.collect()
    before, owned = Counter(open_files()), Owned(monkeypatch)
    loader = loading_ahead()
    list(islice(loader, read))
    pid = worker_of(loader).pid
    processes = group(pid)
    assert len(processes) == 3  # with PyTorch's two
    loader.terminate()
    assert not group(pid)
    loader.terminate()  # again means nothing
    for use in (iter, lambda loader: next(iter(loader))):
        with pytest.raises(AssertionError, match="the worker has been terminated"):
            use(loader)
    del loader
    gc.collect()
    own = [f"torch_{process}_" for process in (os.getpid(), *processes)]
    assert not Counter(owned.open(*own)) - before
    assert not shared_memory([os.getpid(), *processes])


def test_garbage_leaves_no_process() -> None:
    loader = loading_ahead()
    pid = worker_of(loader).pid
    last = next(iter(loader))
    del loader
    assert until(lambda: not group(pid))
    assert int(last) == 0  # whoever keeps a tensor keeps its memory


def test_terminate_does_not_wait_for_a_dataset_that_takes_forever(accessor: Any) -> None:
    loaded = accessor(Numbers(9, At(1, time.sleep, 10 * PATIENCE)))
    next(iter(loaded))
    loaded.terminate()  # which would hang
    assert not group(worker_of(loaded).pid)


PROGRAM = """
import os, signal, sys, threading, time
import torch
from gpusim import poptorch
from gpusim.poptorch.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == 15 and sys.argv[1] == "blocked":
            time.sleep(10000)
        return torch.tensor([index])

def main():
    loader = DataLoader(
        poptorch.Options(), Numbers(), num_workers=2, mode=poptorch.DataLoaderMode.Async,
        async_options={"sharing_strategy": poptorch.SharingStrategy[sys.argv[2]]},
    )
    print(loader._accessor._worker.pid, flush=True)
    for number in loader:
        pass
    if sys.argv[1] == "idle":
        print("read", flush=True)
        time.sleep(10000)

if __name__ == "__main__":
    main()
"""


def started(path: Path, what: str, strategy: str, program: str = PROGRAM) -> subprocess.Popen[str]:
    (path / "program.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, path / "program.py", what, strategy],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("what", "number", "strategy"),
    [("idle", signal.SIGINT, "Fork"), ("blocked", signal.SIGKILL, "ForkServer")],
)
def test_the_worker_ends_with_its_program(
    what: str, number: signal.Signals, strategy: str, tmp_path: Path
) -> None:
    with started(tmp_path, what, strategy) as program:
        assert program.stdout is not None and program.stderr is not None
        pid = int(program.stdout.readline())
        if what == "idle":
            assert program.stdout.readline() == "read\n"
        assert len(group(pid)) == 3
        if number == signal.SIGINT:
            os.killpg(program.pid, number)  # as a terminal does
        else:
            program.kill()
        errors = program.stderr.read()
        assert program.wait(PATIENCE) == -number
    assert until(lambda: not group(pid))
    assert errors.strip().endswith("KeyboardInterrupt" if number == signal.SIGINT else "")
    assert errors.count("Traceback") == (number == signal.SIGINT)


def test_a_program_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    program = PROGRAM.replace('if __name__ == "__main__":\n    main()', "main()")
    with started(tmp_path, "done", "ForkServer", program) as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert errors.count(NOT_STARTED) and "has to be guarded by `if __name__" in errors


def test_a_program_that_ends_with_a_worker_ends_and_the_log_says_how(tmp_path: Path) -> None:
    program = PROGRAM.replace("def main():", "poptorch.setLogLevel('DEBUG')\n\ndef main():")
    with started(tmp_path, "done", "Fork", program) as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0
    assert until(lambda: not group(int(output)))
    lines = [line.split("] ", 3)[3] for line in errors.splitlines()]
    assert lines[0] == f"AsynchronousDataAccessor parent process: {process.pid}"
    assert lines[1] == f"AsynchronousDataAccessor worker process: {int(output)}"
    assert lines[2:6] == [
        "AsynchronousDataAccessor worker: end of dataset reached",
        "AsynchronousDataAccessor worker: end of dataset reached. Creating a new iterator",
        "AsynchronousDataAccessor worker: the iterator has been reset",
        "AsynchronousDataAccessor worker: ready to exit: checking parent is ready",
    ]
    assert lines[6:] == ["AsynchronousDataAccessor worker: clean exit"]
