"""`gpusim run`: processes that scripts start by themselves are ranks, beside real gloo.

Most tests fork this process, which has torch, for `gpusim run` and for plain Python.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing.util
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from gpusim.tools.cli import main
from gpusim.tools.program import split
from gpusim.tools.run import WITH_VALUE
from tests.oracles.machine_time import until

#: What the forks have then.
for _name in (
    "gpusim.torch.distributed.runners.client",
    "gpusim.torch.distributed.runners.worlds",
    "torch._dynamo",
):
    importlib.import_module(_name)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes need Linux"),
    pytest.mark.skipif(not dist.is_gloo_available(), reason="the other side is gloo"),
]

RUN = (sys.executable, "-m", "gpusim", "run")


class Ended(NamedTuple):
    """How a program has ended."""

    code: int
    out: str
    err: str

    def lines(self) -> list[str]:
        return sorted(self.out.splitlines())


def forked(run: Callable[[], object], folder: Path) -> Ended:
    """How a function ends in a fork of this process, with the output of all its processes."""
    process = os.fork()
    if not process:
        code = 1
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
            try:
                code = int(run() or 0)
            finally:
                multiprocessing.util._exit_function()
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(process, 0)
    out, err = ((folder / name).read_text() for name in ("out", "err"))
    return Ended(os.waitstatus_to_exitcode(status), out, err)


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(dedent(HEAD) + dedent(text))
    return str(path)


HEAD = """
    import datetime, os, sys, time
    import torch, torch.distributed as dist, torch.multiprocessing as mp
    from torch.nn.parallel import DistributedDataParallel

    def say(*what):
        \"\"\"A line in one piece, as those of other processes come at the same time.\"\"\"
        os.write(1, (" ".join(map(str, what)) + "\\n").encode())

    def start(f, ranks, method="fork", *args):
        \"\"\"Processes as scripts start them; their exit codes.\"\"\"
        context = mp.get_context(method)
        processes = [context.Process(target=f, args=(rank, ranks, *args)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [process.exitcode for process in processes]
"""


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def simulated(folder: Path, path: str, *options: str, arguments: Sequence[str] = ()) -> Ended:
    return forked(lambda: main(["run", *options, path, *arguments]), folder)


def plain(folder: Path, path: str, *arguments: str) -> Ended:
    def run() -> None:
        sys.argv = [path, *arguments]
        runpy.run_path(path, run_name="__main__")

    return forked(run, folder)


@pytest.fixture(autouse=True)
def address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", free_port())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def recorded(name: str) -> int:
    """The ranks of a record that is whole: gpusim has made their calls, and nothing else has."""
    lines = [json.loads(line) for line in Path(name).read_text().splitlines()]
    assert lines[-1] == {"kind": "end", "calls": len([x for x in lines if x["kind"] == "call"])}
    ranks: int = lines[0]["ranks"]
    return ranks


TRAIN = """
    def train(rank, ranks, how="env"):
        port = os.environ["MASTER_PORT"]
        about = {"rank": rank, "world_size": ranks}
        if how == "variables":
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
            about = {}
        if how == "tcp":
            about["init_method"] = f"tcp://127.0.0.1:{port}"
        if how == "file":
            about["init_method"] = f"file://{os.path.abspath('meet')}"
        if how == "tcp store":
            about["store"] = dist.TCPStore("127.0.0.1", int(port), ranks, rank == 0)
        if how == "file store":
            about["store"] = dist.FileStore(os.path.abspath("meet"), ranks)
        dist.init_process_group("gloo", **about)
        torch.manual_seed(rank)
        model = DistributedDataParallel(torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
        total = sum(p.double().sum() for p in model.parameters()).item()
        say(how, rank, dist.get_world_size(), dist.get_backend(), total.hex())
        dist.barrier()
        if "GPUSIM_HUB" not in os.environ:
            os._exit(0)  # the end of gloo's groups, which DDP holds, waits for itself now and then
        if how != "left":
            dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 3])
def test_training_has_the_bits_of_gloo(tmp_path: Path, ranks: int) -> None:
    """Two worlds, one after another; the second does not destroy its group."""
    text = f"""{TRAIN}
    for how in ("env", "left"):
        print(start(train, {ranks}, "fork", how))
    """
    path = script(tmp_path, text)
    found = simulated(tmp_path, path, "--reduction", "gloo-ring", "--record", "calls.jsonl")
    assert found.code == 0, found.err
    assert recorded("calls.jsonl") == recorded("calls-2.jsonl") == ranks
    assert found.lines() == plain(tmp_path, path).lines()
    assert len(found.lines()) == 2 * ranks + 2


@pytest.mark.parametrize("how", ["variables", "tcp", "file", "tcp store", "file store"])
def test_ranks_meet_in_each_way(tmp_path: Path, how: str) -> None:
    path = script(tmp_path, f"{TRAIN}\n    print(start(train, 2, 'fork', {how!r}))")
    found = simulated(tmp_path, path, "--reduction", "gloo-ring", "--record", "calls.jsonl")
    assert found.code == 0, found.err
    assert recorded("calls.jsonl") == 2
    (tmp_path / "meet").unlink(missing_ok=True)
    assert found.lines() == plain(tmp_path, path).lines()


def test_worlds_at_the_same_time(tmp_path: Path) -> None:
    text = """
    def work(index, count):
        world, rank = divmod(index, 3)
        port = int(os.environ["MASTER_PORT"]) + world
        dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=3)
        x = torch.tensor(10.0**index)
        dist.all_reduce(x)
        say(index, x.item())
        dist.barrier()
    print(start(work, 6))
    """
    found = simulated(tmp_path, script(tmp_path, text))
    assert found.code == 0, found.err
    sums = [111.0] * 3 + [111000.0] * 3
    assert found.lines() == sorted([*(f"{i} {x}" for i, x in enumerate(sums)), str([0] * 6)])


FAIL = """
    def work(rank, ranks):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        x = torch.ones(3)
        dist.all_reduce(x)
        if rank == 1:
            raise KeyError("weights")
        dist.all_reduce(x)

    if sys.argv[1:] == ["processes"]:
        print(start(work, 2))
    else:
        mp.start_processes(work, (2,), 2, start_method="fork")
"""


def test_the_rank_that_fails_is_the_one_that_is_reported(tmp_path: Path) -> None:
    path = script(tmp_path, FAIL)
    found, real = simulated(tmp_path, path), plain(tmp_path, path)
    assert found.code == real.code == 1
    assert "ProcessRaisedException" in found.err and "ProcessRaisedException" in real.err
    # Of gloo's ranks it may be the other one, whose connection was closed.
    assert "-- Process 1 terminated with the following error" in found.err
    assert "KeyError: 'weights'" in found.err


def test_others_are_told_who_has_failed(tmp_path: Path) -> None:
    path = script(tmp_path, FAIL)
    found = simulated(tmp_path, path, arguments=["processes"])
    assert found.out == plain(tmp_path, path, "processes").out == "[1, 1]\n"
    assert re.search(
        r"DeadlockError: no rank can go on: rank 0 waits in all_reduce\(.*train.py:\d+; "
        r"rank 1 raised KeyError: 'weights'",
        found.err,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "dist.broadcast(x, 0) if rank == 2 else dist.all_reduce(x)",
            r"CollectiveMismatchError: ranks of .* do not make the same call 0: .*train.py:\d+.*"
            r"train.py:\d+; they differ in operation",
        ),
        (
            "dist.recv(x, (rank + 1) % 3)",
            r"DeadlockError: no rank can go on: rank 0 waits in recv from rank 1 .*rank 1 waits",
        ),
        (
            "os._exit(7) if rank == 2 else dist.all_reduce(x)",
            "rank 2 is gone: its process has ended without a word",
        ),
        (
            "os.kill(os.getpid(), 9) if rank == 2 else dist.all_reduce(x)",
            "rank 2 is gone: its process has ended without a word",
        ),
        ("sys.exit(3) if rank == 2 else dist.all_reduce(x)", "rank 2 has ended with exit code 3"),
        (
            "dist.destroy_process_group() if rank == 2 else dist.all_reduce(x)",
            "rank 2 has left its group",
        ),
    ],
    ids=["mismatch", "deadlock", "exits", "killed", "sys.exit", "leaves"],
)
def test_errors_name_ranks_and_end_all(tmp_path: Path, text: str, said: str) -> None:
    body = f"""
    def work(rank, ranks):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        x = torch.ones(3)
        {text}
    print(start(work, 3))
    """
    found = simulated(tmp_path, script(tmp_path, body))
    last = {"os._exit": 7, "os.kill": -9, "sys.exit": 3, "dist.dest": 0}
    code = next((code for name, code in last.items() if text.startswith(name)), 1)
    assert found.out == f"[1, 1, {code}]\n", found.err
    assert len(re.findall(said, found.err)) >= 2, found.err


def test_an_error_that_a_program_catches_ends_nothing(tmp_path: Path) -> None:
    body = """
    def work(rank, ranks):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        try:
            dist.all_reduce(torch.ones(2 + rank))
        except RuntimeError as error:
            say(type(error).__name__)
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        x = torch.ones(2)
        dist.all_reduce(x)
        say(x.tolist())
    print(start(work, 3))
    """
    found = simulated(tmp_path, script(tmp_path, body))
    expected = ["CollectiveMismatchError"] * 3 + ["[0, 0, 0]"] + ["[3.0, 3.0]"] * 3
    assert found.lines() == sorted(expected), found.err


def test_ranks_meet_again_though_rank_0_is_late(tmp_path: Path) -> None:
    body = """
    def work(rank, ranks):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        dist.barrier()
        if rank == 0:
            time.sleep(0.5)  # the others come again meanwhile
        dist.destroy_process_group()
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        x = torch.ones(2)
        dist.all_reduce(x)
        say(x.tolist())
    print(start(work, 3))
    """
    found = simulated(tmp_path, script(tmp_path, body))
    assert found.lines() == sorted(["[0, 0, 0]"] + ["[3.0, 3.0]"] * 3), found.err


def test_a_port_that_another_world_has_is_in_use(tmp_path: Path) -> None:
    body = """
    def first(rank, ranks, met, tried):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        dist.barrier()
        met.release()
        tried.acquire()

    def second(rank, ranks):
        dist.init_process_group("gloo", rank=rank, world_size=2)
    fork = mp.get_context("fork")
    met, tried = fork.Semaphore(0), fork.Semaphore(0)
    processes = [fork.Process(target=first, args=(rank, 2, met, tried)) for rank in range(2)]
    for process in processes:
        process.start()
    met.acquire()
    print(start(second, 1))
    for process in processes:
        tried.release()
    for process in processes:
        process.join()
    print([process.exitcode for process in processes])
    """
    found = simulated(tmp_path, script(tmp_path, body))
    assert found.lines() == ["[0, 0]", "[1]"], found.err
    said = r"port \d+ is in use \(EADDRINUSE\) by a world of 2 ranks"
    assert re.search(said, found.err), found.err


MISSING = """
    def work(rank, ranks):
        if rank == 1 and sys.argv[1] == "returns":
            return
        if rank == 1:
            time.sleep(3600)
        expires = rank == 2 and sys.argv[1] == "sleeps"
        about = {"rank": rank, "world_size": ranks}
        about["timeout"] = datetime.timedelta(seconds=0.3 if expires else 3600)
        said = ""
        while "rank 1 has not come" not in said:  # rank 0 may be late as well
            try:
                dist.init_process_group("gloo", **about)
            except dist.DistStoreError as error:
                said = str(error)
        say(said)
        if expires:
            os.killpg(0, 9)
    if sys.argv[1] == "sleeps":
        os.setpgid(0, 0)
    print(start(work, 3))
"""


@pytest.mark.parametrize("how", ["returns", "sleeps"])
def test_ranks_that_do_not_come_are_named(tmp_path: Path, how: str) -> None:
    """At once if no process could be one; else after the program's time-out."""
    found = simulated(tmp_path, script(tmp_path, MISSING), arguments=[how])
    said = "timed out after 0.3 seconds" if how == "sleeps" else "no rank can come"
    assert said in found.out
    assert re.search(
        r"of 3 ranks that are to meet at port \d+, rank 1 has not come; there are rank 0 .*rank 2",
        found.out,
    )
    assert "train.py:" in found.out


@pytest.mark.parametrize(
    ("rank", "size", "said"),
    [
        ("0", "2", "two processes that meet at port .* have the same rank: rank 0"),
        ("rank", "2 + rank", "differ in world_size: rank . .* says [23], .* says [23]"),
        ("rank + 2", "2", "rank=2, world_size=2: expected a rank from 0 to world_size - 1"),
    ],
    ids=["same", "sizes", "range"],
)
def test_wrong_ranks_are_refused(tmp_path: Path, rank: str, size: str, said: str) -> None:
    body = f"""
    def work(rank, ranks):
        about = {{"rank": {rank}, "world_size": {size}}}
        dist.init_process_group("gloo", timeout=datetime.timedelta(hours=1), **about)
    print(start(work, 2))
    """
    found = simulated(tmp_path, script(tmp_path, body))
    assert found.out == "[1, 1]\n"
    assert re.search(said, found.err), found.err


def test_wrong_arguments_are_torchs_errors(tmp_path: Path) -> None:
    body = """
    os.environ.pop("MASTER_PORT", None)
    one = {"rank": 0, "world_size": 1}
    store = dist.HashStore()
    for args, named in (
        (("gloo",), {}),
        (("gloo",), {"rank": 0}),
        (("gloo",), one),
        (("gloo", "tcp://localhost"), one),
        (("gloo", "tcp://localhost:99999"), one),
        (("gloo", "tcp://localhost:1?rank=0"), one),
        (("gloo", "xyz://a"), one),
        (("no such",), one),
        (("gloo",), {"store": store}),
        (("gloo",), {"store": store, "world_size": 1}),
        (("gloo", "env://"), {"store": store, **one}),
        ((3,), one),
        ((), {"no_such": 3}),
        (("gloo", 3), one),
        (("gloo",), {**one, "timeout": 3, "store": store}),
        (("gloo",), {**one, "device_id": torch.device("cuda"), "store": store}),
    ):
        try:
            dist.init_process_group(*args, **named)
        except BaseException as error:
            print(type(error).__name__, error)
        else:
            print("no error", args, named)
        assert not dist.is_initialized()
    """
    path = script(tmp_path, body)
    found, real = simulated(tmp_path, path), plain(tmp_path, path)
    assert found.code == real.code == 0, real.err
    assert found.out == real.out
    assert len(found.lines()) >= 16 and "no error" not in found.out


def test_a_process_alone_is_a_world(tmp_path: Path) -> None:
    """The script's first process, with a store in its memory; then again."""
    body = """
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        x = torch.ones(2)
        dist.all_reduce(x)
        print(x.tolist(), dist.get_rank(), type(dist.group.WORLD).__name__)
        try:
            dist.init_process_group("gloo", rank=0, world_size=1)
        except ValueError as error:
            print(error)
        dist.destroy_process_group()
        print(dist.is_initialized())
    dist.init_process_group("fake", rank=0, world_size=4)
    print(dist.get_world_size())
    """
    path = script(tmp_path, body)
    found, real = simulated(tmp_path, path), plain(tmp_path, path)
    assert found.code == 0, found.err
    assert found.out == real.out


def test_ranks_run_at_the_same_time(tmp_path: Path) -> None:
    """They may wait for each other in multiprocessing's queues and barriers, and poll."""
    body = """
    def work(rank, ranks, barrier, queue):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        barrier.wait()
        if rank == 0:
            time.sleep(0.2)
            queue.put("x")
        if rank == 2:
            say(queue.get())
        x = torch.ones(1)
        if rank == 1:
            barrier.wait()
        work = dist.all_reduce(x, async_op=True)
        if rank != 1:
            while not barrier.n_waiting:
                time.sleep(0.01)
            barrier.wait()
        while not work.is_completed():
            pass
        say(x.item())
    context = mp.get_context("fork")
    print(start(work, 3, "fork", context.Barrier(3), context.Queue()))
    """
    found = simulated(tmp_path, script(tmp_path, body))
    assert found.lines() == ["3.0", "3.0", "3.0", "[0, 0, 0]", "x"], found.err


def test_what_was_called_is_shown_and_recorded(tmp_path: Path) -> None:
    path = script(tmp_path, f"{TRAIN}\n    for _ in (0, 1):\n        start(train, 3)")
    options = ["-v", "--summary", "--record", str(tmp_path / "calls.jsonl"), "--reduction", "tree"]
    found = simulated(tmp_path, path, *options, "--trace", str(tmp_path / "trace.json"))
    assert found.code == 0, found.err
    assert found.out.count("Collectives of 3 ranks") == 2
    said = [line for line in found.err.splitlines() if line.startswith("gpusim run: ")]
    assert said[0].startswith(f"gpusim run: {path} as python runs it; ")
    assert [line.partition(": ")[2] for line in said[1:]] == [
        f"world {n}: 3 ranks, processes that the program has started; sums: tree" for n in (1, 2)
    ]
    for name in ("calls.jsonl", "calls-2.jsonl"):
        lines = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert lines[0]["ranks"] == 3
        assert lines[-1]["kind"] == "end"
        sums = [each for each in lines if each.get("operation") == "all_reduce"]
        assert {each["rank"] for each in sums} == {0, 1, 2}
        assert {each["reduction"] for each in sums} == {"tree"}
        assert all("train.py:" in each["site"] for each in sums)
    assert json.loads((tmp_path / "trace-2.json").read_text())


def test_the_cpu_plays_gpus_in_each_process(tmp_path: Path) -> None:
    """As in PyTorch's examples, which start a rank for each GPU of the machine."""
    body = """
    def main_worker(gpu, ngpus):
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", rank=gpu, world_size=ngpus)
        model = DistributedDataParallel(torch.nn.Linear(3, 1).cuda(gpu), device_ids=[gpu])
        model(torch.ones(2, 3).cuda(gpu, non_blocking=True)).sum().backward()
        x = torch.ones(1, device=f"cuda:{gpu}")
        dist.all_reduce(x)
        say(gpu, torch.cuda.current_device(), x.item(), dist.get_backend())
        dist.destroy_process_group()
    ngpus = torch.cuda.device_count()
    mp.start_processes(main_worker, (ngpus,), ngpus, start_method="fork")
    """
    path = script(tmp_path, body)
    found = simulated(tmp_path, path, "--device", "cpu", "--devices", "3")
    assert found.code == 0, found.err
    assert found.lines() == [f"{rank} {rank} 3.0 nccl" for rank in range(3)]


@pytest.mark.parametrize("mode", ["--threads", "--processes"])
def test_a_rank_of_torchrun_starts_ranks(tmp_path: Path, mode: str) -> None:
    path = script(tmp_path, f"{TRAIN}\n    print(start(train, 3))")
    options = ["--reduction", "gloo-ring", "--record", "calls.jsonl", mode]
    found = forked(lambda: main(["torchrun", *options, path]), tmp_path)
    assert found.code == 0, found.err
    lines = sorted(re.sub(r"^\[rank0\]: ", "", line) for line in found.out.splitlines())
    assert lines == plain(tmp_path, path).lines()
    assert recorded("calls-2.jsonl") == 3
    assert "RuntimeWarning" not in found.err


def test_a_stranger_is_not_let_in(tmp_path: Path) -> None:
    body = """
    import json, socket
    about = json.loads(os.environ["GPUSIM_HUB"])
    hello = {"key": "k", "rank": 0, "size": 1, "name": "", "site": "", "timeout": 9}
    for content in (
        json.dumps({"token": "x", **hello}), json.dumps(hello), "[]", "3", "{", "x" * 100000,
        json.dumps({"token": about["token"]}), json.dumps({**hello, "token": "é"}),
    ):
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(chr(0) + about["name"])
            try:
                end.sendall(content.encode() + b"\\n")
                print(end.recv(9))
            except OSError:
                print(b"")
    dist.init_process_group("gloo", rank=0, world_size=1)
    print(dist.get_rank())
    """
    found = simulated(tmp_path, script(tmp_path, body))
    assert found.out == "b''\n" * 8 + "0\n", found.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "2"], "--devices 2 needs --device cpu"),
        (["--arrays", "all"], "--arrays needs --record with a folder"),
    ],
)
def test_wrong_options(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options, str(tmp_path / "x.py")]) == 2
    assert capsys.readouterr().err.startswith(f"gpusim run: {said}")


def test_options_end_at_the_program() -> None:
    own = ["--device", "cpu", "--record", "x", "--summary", "--reduction=ring"]
    assert split([*own, "a.py", "--device"], WITH_VALUE) == ([*own, "a.py"], ["--device"])
    assert split([*own, "-m", "a", "-m"], WITH_VALUE) == ([*own, "-m", "a"], ["-m"])


# In processes of their own

METHODS = """
    def show(rank, ranks):
        say("left alone", "gpusim.torch.distributed" in sys.modules)

    if __name__ == "__main__":
        method = sys.argv[1]
        print(start(train, 3, method), start(show, 1, method))
        if method == "spawn":
            context = mp.spawn(train, (2,), 2, join=False)
            while not context.join():
                pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_start_methods(tmp_path: Path, method: str) -> None:
    """Beside plain Python; a process that is no rank has nothing of gpusim's."""
    path = script(tmp_path, TRAIN + METHODS)
    options = ["--reduction", "gloo-ring", "--record", "calls.jsonl"]
    found = subprocess.run([*RUN, *options, path, method], capture_output=True, text=True)
    real = subprocess.run([sys.executable, path, method], capture_output=True, text=True)
    assert found.returncode == real.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == sorted(real.stdout.splitlines())
    assert "left alone False" in found.stdout
    assert recorded("calls.jsonl") == 3


@pytest.mark.slow
def test_torchs_own_launcher_and_its_sitecustomize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts Python by subprocess; a sitecustomize of the environment runs as well."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['SEEN'] = __file__\n")
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(tmp_path)]),
    )
    path = script(
        tmp_path, f"{TRAIN}\n    say(os.environ['SEEN'])\n    train(int(os.environ['RANK']), 2)"
    )
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", path]
    options = ["--reduction", "gloo-ring", "--record", "calls.jsonl"]
    found = subprocess.run([*RUN, *options, *launcher], capture_output=True, text=True)
    real = subprocess.run([sys.executable, *launcher], capture_output=True, text=True)
    assert found.returncode == real.returncode == 0, found.stderr
    assert sorted(found.stdout.splitlines()) == sorted(real.stdout.splitlines())
    assert str(tmp_path / "sitecustomize.py") in found.stdout
    assert recorded("calls.jsonl") == 2


WAIT = """
    def work(rank, ranks):
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        say("in", os.getpid())
        if rank == 0:
            time.sleep(3600)
        dist.barrier()
    if __name__ == "__main__":
        mp.start_processes(work, (3,), 3, start_method="fork")
"""


def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    """Ctrl-C reaches the script's processes, as the terminal sends it to all; the hub ends too."""
    path = script(tmp_path, WAIT)
    (tmp_path / "own").mkdir()
    process = os.fork()
    if not process:
        os.setpgid(0, 0)
        code = 99
        try:
            code = simulated(tmp_path / "own", path).code
        finally:
            os._exit(code & 0xFF)
    out = tmp_path / "own" / "out"
    assert until(lambda: out.exists() and out.read_text().count("in ") == 3)
    ranks = [int(line.split()[1]) for line in out.read_text().splitlines()]
    hubs = hubs_of(out)
    assert hubs
    os.killpg(process, signal.SIGINT)
    os.waitpid(process, 0)
    assert until(lambda: not any(Path(f"/proc/{each}").exists() for each in [*ranks, *hubs]))


def hubs_of(output: Path) -> list[int]:
    """Processes of this session's children that write to a file, and lead a session."""
    result = []
    for each in Path("/proc").iterdir():
        if each.name.isdecimal() and os.getsid(int(each.name)) == int(each.name):
            try:
                if os.path.samefile(each / "fd" / "1", output):
                    result.append(int(each.name))
            except OSError:
                pass
    return result


def test_a_check_says_that_ranks_which_the_program_starts_are_not_checked(tmp_path: Path) -> None:
    path = script(
        tmp_path,
        """
        def train(rank, ranks):
            dist.init_process_group("gloo", rank=rank, world_size=ranks)
            dist.all_reduce(torch.ones(2))
            dist.destroy_process_group()

        start(train, 2)
        """,
    )
    said = "the 2 ranks of world 1 are not checked; gpusim torchrun --check checks ranks"
    done = simulated(tmp_path, path, "--check")
    assert done.code == 0 and said in done.err and "check: no findings" in done.err
    assert said not in simulated(tmp_path, path).err
