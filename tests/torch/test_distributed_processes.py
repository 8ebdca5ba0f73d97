"""Ranks as processes: the bits of threads and of gloo, globals of modules, and what ends them."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gpusim import CollectiveMismatchError, DeadlockError, GpusimError, Reduction, ReplicaError
from gpusim import reduction as reduce_by
from gpusim.torch.distributed import FoldCall, Recorder, launch
from gpusim.torch.distributed.runners import messages
from tests.oracles.budget import budget, seeds, slow
from tests.oracles.machine_time import PATIENCE, until
from tests.oracles.owned import nothing_left
from tests.torch.children import needs_linux
from tests.torch.distributed_programs import PROGRAMS, start
from tests.torch.gloo_cases import assert_equal_bits, case_name, run
from tests.torch.gloo_ranks import ROOT, Case
from tests.torch.wrong_programs import (
    crossed,
    mutated,
    other_groups,
    other_message,
    other_operation,
    random_step,
    returns_early,
    take_step,
)

pytestmark = [
    needs_linux,
]
HERE = re.escape(__file__)
STATE: dict[str, int] = {}


def mapped() -> int:
    """How many segments of shared memory are mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:gpusim")


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No process, file or shared memory of a launch is left."""
    launch(int, 1, processes=True)  # modules of torch are loaded, which may keep files open
    with nothing_left(tmp_path):
        yield
    assert mapped() == 0


# Bits


SMALL: list[Case] = [
    ("collectives", 3, {"sizes": [7, 147], "dtypes": ["float32", "int64"], "seed": 1}),
    ("rearrangements", 3, {"seed": 0}),
    ("messages", 3, {"seed": 0}),
    ("groups", 3, {"seed": 0}),
    ("functional", 2, {"seed": 0}),
    ("ddp", 2, {"seed": 0, "dropout": 0.3}),
    ("fsdp2", 2, {"seed": 0, "low": "bfloat16"}),
]


@pytest.mark.parametrize("case", SMALL, ids=case_name)
def test_bits_are_those_of_threads(case: Case, tmp_path: Path) -> None:
    assert_equal_bits(run(case, tmp_path), run(case, tmp_path, processes=True))


@pytest.mark.parametrize("case", [SMALL[3], *slow(*((case,) for case in SMALL))], ids=case_name)
def test_free_processes_have_the_same_bits(case: Case, tmp_path: Path) -> None:
    """Also of programs that draw, as generators belong to the process."""
    expected = run(case, tmp_path)
    assert_equal_bits(expected, run(case, tmp_path, processes=True, schedule="free"))


def test_reductions_are_chosen_in_the_process() -> None:
    """By launch, by a function of the process's own state, by pg_options, and by the context."""
    values = np.random.default_rng(0).standard_normal((3, 41)).astype(np.float32)

    def choose(call: FoldCall) -> Any:
        return Reduction(order=("reverse", "tree")[STATE["chosen"]], accumulate="float64")

    def program(rank: int) -> list[torch.Tensor]:
        start()
        STATE["chosen"] = 1
        options = [None, "ring", choose, lambda call: Reduction.twins()["mpich"].schedule]
        options[3] = Reduction(order=Reduction.twins()["mpich"].schedule)  # no name for it
        found = []
        for each in options:
            group = dist.new_group(pg_options=each)
            for context in ({}, {"order": "tree", "rounding": "stochastic", "seed": 3}):
                with reduce_by(**context):
                    for _ in range(2):
                        x = torch.from_numpy(values[rank].copy()).bfloat16()
                        dist.all_reduce(x, group=group)
                        found.append(x)
        return found

    for chosen in (None, "reverse", choose):
        threads = launch(program, 3, reduction=chosen)
        processes = launch(program, 3, reduction=chosen, processes=True)
        for one, other in zip(threads, processes, strict=True):
            assert all(map(torch.equal, one, other))


def test_results_of_works_that_nobody_has_waited_for() -> None:
    """As in order of NCCL's stream: the second call takes what the first has given."""

    def program(rank: int) -> torch.Tensor:
        start()
        x = torch.full((5,), rank + 1.0)
        works = [dist.all_reduce(x, async_op=True) for _ in range(2)]
        dist.all_reduce(x[1:3])
        for work in works:
            work.wait()
        return x

    assert launch(program, 3, processes=True)[1].tolist() == [18, 54, 54, 18, 18]


def test_memory_of_any_layout_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SEGMENT", 1 << 16)

    def program(rank: int) -> list[torch.Tensor]:
        start()
        wide = torch.arange(24.0).reshape(4, 6) + rank
        column, turned = wide[:, 1], wide.t()
        dist.all_gather([column, wide[:, 3]], column.clone())  # with gaps
        dist.all_reduce(turned)
        large = torch.full((30_000,), 0.1 * rank)
        pending = dist.all_reduce(large, async_op=True)
        more = torch.full((300_000,), float(rank), dtype=torch.bfloat16)
        dist.all_reduce(more)  # a new segment
        pending.wait()
        empty = torch.empty(0, 3)
        dist.all_reduce(empty)
        return [wide, large, more[::10_000].clone(), empty]

    for one, other in zip(launch(program, 2), launch(program, 2, processes=True), strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_the_cpu_plays_gpus_of_processes() -> None:
    def program(rank: int) -> tuple[Any, ...]:
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        x = torch.full((3,), 1.0 + rank, device=f"cuda:{rank}")
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        pair = dist.split_group(split_ranks=[[0, 2], [1]])
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).cuda(), [rank])
        model(x * rank).sum().backward()
        (weight, _) = model.parameters()
        assert weight.grad is not None
        return x, torch.cuda.device_count(), dist.get_world_size(pair), weight.grad

    found = launch(program, 3, device="cpu", processes=True)
    assert [each[1:3] for each in found] == [(3, 2), (3, 1), (3, 2)]
    for x, _, _, gradient in found:
        assert x.tolist() == [3.0] * 3 and gradient.tolist() == [[3.0] * 3]


def test_records_are_the_same(tmp_path: Path) -> None:
    paths = []
    for number, processes in enumerate((False, True)):
        paths.append(tmp_path / f"{number}.jsonl")
        recorder = Recorder(paths[-1])
        launch(lambda rank: PROGRAMS["groups"](seed=0), 3, recorder=recorder, processes=processes)
    assert paths[0].read_text() == paths[1].read_text()
    assert len(paths[0].read_text().splitlines()) > 30


# What belongs to a process


def test_modules_and_all_else_belong_to_the_rank() -> None:
    before = dict(os.environ), os.getcwd(), list(sys.argv)

    def program(rank: int) -> Any:
        start()
        STATE["rank"] = rank
        os.environ["OWN"] = str(rank)
        sys.argv.append(str(rank))
        os.chdir("/")
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        dist.barrier()
        said = os.popen("echo $OWN $RANK").read().split()
        return STATE["rank"], said, random.random(), torch.rand(1), os.getpid(), sys.argv[-1]

    STATE.clear()
    found = launch(program, 3, processes=True)
    for rank, (state, said, _, _, _, argument) in enumerate(found):
        assert (state, said, argument) == (rank, [str(rank)] * 2, str(rank))
    assert len({os.getpid(), *(each[4] for each in found)}) == 4
    for drawn in (2, 3):
        assert len({float(each[drawn]) for each in found}) == 3
    assert STATE == {}
    assert before == (dict(os.environ), os.getcwd(), list(sys.argv))


def test_what_can_be_returned() -> None:
    values: list[Any] = [
        None,
        {"a": [1, 2.5, (True, "x", b"y", 2j)], "s": {1, 2}},
        OrderedDict(w=torch.ones(2, dtype=torch.bfloat16), b=torch.nn.Parameter(torch.ones(1))),
        np.arange(3.0),
        np.float32(2),
        torch.float32,
    ]
    (found,) = launch(lambda rank: values, 1, processes=True)
    assert str(found) == str(values)
    assert [type(each) for each in found] == [type(each) for each in values]
    for wrong in (lambda: 1, torch.nn.Linear(1, 1), re.compile("x")):
        with pytest.raises(ReplicaError, match=r"rank 0 raised TypeError.*cannot be handed"):
            launch(lambda rank, wrong=wrong: wrong, 1, processes=True)


def test_output_is_that_of_the_parent(capsys: pytest.CaptureFixture[str]) -> None:
    def program(rank: int) -> None:
        start()
        print("begin", rank, end="")
        dist.barrier()
        print(f" end {rank}\n", file=sys.stderr, flush=True)

    texts = []
    for processes in (False, True):
        launch(program, 3, processes=processes)
        texts.append(capsys.readouterr())
    assert texts[0] == texts[1]


def test_exit_handlers_of_the_process_alone_run(tmp_path: Path) -> None:
    import atexit

    mine = tmp_path / "parent"
    handler = atexit.register(mine.touch)

    def program(rank: int) -> None:
        atexit.register((tmp_path / str(rank)).touch)

    try:
        launch(program, 2, processes=True)
    finally:
        atexit.unregister(handler)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.own_process
def test_openmp_of_the_parent_hangs_no_process() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(600, 600)
        expected = x @ x + x.exp().sum()
        x.requires_grad_().sum().backward()

        def program(rank: int) -> torch.Tensor:
            torch.set_num_threads(2)
            y = x.detach()
            return y @ y + y.exp().sum()

        for found in launch(program, 2, processes=True):
            assert torch.allclose(found, expected, rtol=1e-3, atol=1e-2)
    finally:
        torch.set_num_threads(threads)


# Faults


def fails(program: Callable[[int], Any], error: type[BaseException], *said: str, **o: Any) -> str:
    """Assert that the program of 3 ranks ends with an error that says this."""
    with pytest.raises(error) as caught:
        launch(program, 3, processes=True, **o)
    for each in said:
        assert re.search(each, str(caught.value)), str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (other_operation, CollectiveMismatchError, ["rank 2 calls broadcast", "all_reduce"]),
        (other_groups, CollectiveMismatchError, ["makes group '1' of ranks"]),
        (other_message, CollectiveMismatchError, ["rank 1 sends", "rank 2 receives"]),
        (returns_early, DeadlockError, ["ranks 0, 2 wait in all_reduce", "rank 1 has returned"]),
        (crossed, DeadlockError, ["rank 0 waits in barrier.*group '2'"]),
    ],
)
def test_wrong_programs(
    wrong: Callable[[int], None], error: type[GpusimError], said: list[str], schedule: str
) -> None:
    def program(rank: int) -> None:
        start()
        wrong(rank)

    fails(program, error, re.escape("wrong_programs.py"), *said, schedule=schedule)


def killed(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def segfault() -> None:
    import ctypes

    ctypes.string_at(8)


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os._exit(7), "rank 1 ended with exit code 7 before its function returned"),
        (killed(signal.SIGKILL), "rank 1 was killed by SIGKILL"),
        (segfault, "rank 1 was killed by SIGSEGV"),
        (os.abort, "rank 1 was killed by SIGABRT"),
    ],
    ids=["exit", "kill", "segfault", "abort"],
)
def test_a_process_that_ends(end: Callable[[], Any], said: str, schedule: str) -> None:
    def program(rank: int) -> None:
        start()
        dist.barrier()
        if rank == 1:
            faulthandler.disable()  # this end is meant: no stacks in pytest's output
            end()
        dist.barrier()

    text = fails(program, ReplicaError, said, HERE, schedule=schedule)
    assert "its last call was at" in text


class OwnError(Exception):
    pass


def test_a_rank_that_raises(tmp_path: Path) -> None:
    def program(rank: int, error: BaseException) -> None:
        start()
        if rank == 1:
            raise error
        try:
            dist.barrier()
        finally:
            (tmp_path / f"cleaned {rank}").touch()

    class Local(Exception):
        pass

    for error in (KeyError("weights"), OwnError("a", 2), Local("b"), SystemExit(3)):
        said = f"rank 1 raised {type(error).__name__}: {re.escape(str(error))}"
        with pytest.raises(ReplicaError, match=said) as caught:
            launch(program, 3, (error,), processes=True)
        cause = caught.value.__cause__
        assert cause is not None and type(cause).__name__ == type(error).__name__
        if not isinstance(error, Local):
            assert isinstance(cause, type(error)) and cause.args == error.args
        assert f'File "{__file__}"' in str(cause.__cause__) and "raise error" in str(
            cause.__cause__
        )
        assert "gpusim/torch" not in str(cause.__cause__).partition("raise error")[0]
    assert sorted(each.name for each in tmp_path.iterdir())[0] == "cleaned 0"


def test_a_rank_that_hangs_elsewhere_is_ended() -> None:
    def program(rank: int) -> None:
        start()
        if rank == 1:
            time.sleep(0.3)
            raise KeyError("x")
        if rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1000)  # a launch that waits for this rank would hang
        dist.barrier()

    with pytest.raises(ReplicaError, match="rank 1 raised KeyError"):
        launch(program, 2, processes=True, schedule="free")


def test_errors_of_a_call_are_raised_by_it() -> None:
    def program(rank: int) -> str:
        start()
        x = torch.ones(4)
        try:
            dist.all_gather([x.clone()] * 2, x)
        except RuntimeError as error:
            text = str(error)
        group = dist.new_group([0, 1, 2])
        dist.destroy_process_group(group)
        with pytest.raises(ValueError, match="destroyed the group at"):
            group.allreduce([x])
        dist.barrier()
        return text

    assert launch(program, 3, processes=True) == launch(program, 3)


def test_random_wrong_programs_end() -> None:
    failed = 0
    count = budget(150, most=8)
    for seed in seeds(count):
        draw = random.Random(seed)
        size = draw.randrange(2, 5)
        steps = [random_step(draw) for _ in range(draw.randrange(2, 7))]
        wrong, culprit = mutated(draw, steps), draw.randrange(size)

        def program(
            rank: int, size: int = size, steps: Any = steps, wrong: Any = wrong, who: int = culprit
        ) -> None:
            start()
            pair = dist.new_group([0, 1])
            for step in wrong if rank == who else steps:
                take_step(step, rank, size, pair)

        schedule = draw.choice(["turns", "free"])
        texts = []
        for processes in (True, False):
            try:
                launch(program, size, schedule=schedule, processes=processes)
                texts.append("")
            except GpusimError as error:
                texts.append(str(error))
        assert bool(texts[0]) == bool(texts[1])
        if schedule == "turns":
            assert texts[0] == texts[1]
        failed += bool(texts[0])
    assert failed > count // 2


# Ctrl-C, and the end of the parent


SCRIPT = """
import os, sys, time, torch.distributed as dist
from gpusim.torch.distributed import launch

def program(rank):
    dist.init_process_group()
    dist.barrier()
    print("pid", os.getpid(), flush=True)
    while rank == 0:
        pass
    dist.barrier()

launch(program, 3, processes=True, schedule="free")
"""


def started(script: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs a script."""
    path = folder / "script.py"
    path.write_text(script)
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, path], env=environment, **pipes)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals", [[signal.SIGINT], [signal.SIGINT] * 2, [signal.SIGKILL], [signal.SIGTERM]]
)
def test_the_parents_end_is_that_of_its_processes(
    signals: list[signal.Signals], tmp_path: Path
) -> None:
    with started(SCRIPT, tmp_path) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline().split()[1]) for _ in range(3)]
        for number in signals:
            parent.send_signal(number)
            time.sleep(0.1)
        parent.wait(PATIENCE)
        assert until(lambda: not any(map(alive, pids)))
        assert parent.returncode != 0


# Many


MANY = """
import os, torch, torch.distributed as dist
from pathlib import Path
from gpusim.torch.distributed import launch

def own_memory(process):
    "Bytes of memory, of shared pages a half or a third."
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line[:4] == "Pss:")

def program(rank):
    dist.init_process_group()
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2)))
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.full((2, 64), 0.01 * rank)).square().sum().backward()
    optimizer.step()
    dist.barrier()
    own = own_memory(os.getpid()) + (own_memory(os.getppid()) if rank == 0 else 0)
    dist.barrier()
    return own, next(model.parameters()).detach().sum().item()

found = launch(program, 256, processes=True)
print(sum(own for own, _ in found), len({value for _, value in found}))
"""


@pytest.mark.slow
def test_256_ranks_need_less_than_6_gib(tmp_path: Path) -> None:
    """In a process of their own: they share its memory, and that of the tests' is large."""
    with started(MANY, tmp_path) as parent:
        output, errors = parent.communicate(timeout=PATIENCE)
    assert parent.returncode == 0, errors
    total, values = map(int, output.split())
    print(f"{total / 2**30:.2f} GiB, {total / 2**20 / 256:.1f} MiB a rank")
    assert values == 1
    assert total < 6 * 2**30


def compiled_ddp(rank: int) -> list[torch.Tensor]:
    dist.init_process_group()
    grads = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        called = torch.compile(model, backend="eager") if compiled else model
        for _ in range(2):  # in the second step the reducer broadcasts, inside of Dynamo's frame
            called(torch.full((1, 3), rank + 1.0)).square().mean().backward()
        grads += [p.grad for p in model.parameters()]
    return grads


@pytest.mark.parametrize("processes", [False, True])
def test_dynamo_keeps_out_of_groups(processes: bool) -> None:
    """Also of those of processes, whose class is another."""
    for grads in launch(compiled_ddp, 2, processes=processes):
        for eager, compiled in zip(grads[:2], grads[2:], strict=True):
            assert torch.equal(eager, compiled)
