"""Waits for the store that time out: which are counted, and the exception of torch's store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gpusim.tools.cli import main
from gpusim.torch.distributed.faults.stores import timed_out
from tests.tools.test_torchrun import path_is_put_back, script  # noqa: F401

PROGRAM = """
    from datetime import timedelta
    import torch, torch.distributed as dist
    def attempt(what, call):
        try:
            call()
            print(what, "fine")
        except dist.DistStoreError as error:
            print(what, type(error).__name__, error)
    attempt("init", lambda: dist.init_process_group("gloo"))          # wait 1
    if not dist.is_initialized():
        raise SystemExit(0)
    store = dist.distributed_c10d._get_default_store()
    store.set("k", "v")
    store.add("n", 1)
    store.check(["k"])
    attempt("get", lambda: store.get("k"))                            # wait 2
    attempt("wait", lambda: store.wait(["k", "n"], timedelta(seconds=2)))  # wait 3
    attempt("multi", lambda: store.multi_get(["k", "n"]))             # wait 4
    pair = []
    attempt("group", lambda: pair.append(dist.new_group([0, 1])))     # wait 5
    other = dist.PrefixStore("pre", store)
    other.set("k", "w")
    attempt("prefix", lambda: other.get("k"))                         # wait 6
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    dist.destroy_process_group()
"""
WORDS = ["init", "get", "wait", "multi", "group", "prefix"]


def lines(text: str, rank: int) -> list[str]:
    tag = f"[rank{rank}]: "
    return [each.removeprefix(tag) for each in text.splitlines() if each.startswith(tag)]


@pytest.mark.parametrize(
    ("wait", "said"),
    [
        (1, "wait timeout after 1800000ms, keys: /default_pg/0//cpu//0/0"),
        (2, "wait timeout after 1800000ms, keys: /default_pg/0/"),
        (3, "wait timeout after 2000ms, keys: /"),
        (4, "wait timeout after 1800000ms, keys: /"),
        (5, "wait timeout after 1800000ms, keys: /"),
        (6, "wait timeout after 1800000ms, keys: /"),
    ],
)
def test_the_wait_of_that_number_times_out(
    wait: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(tmp_path, PROGRAM)
    plan = f"store-timeout rank=1 wait={wait}"
    main(["torchrun", "--ranks", "2", "--faults", plan, path])
    captured = capsys.readouterr()
    found = lines(captured.out, 1)
    assert found[: wait - 1] == [f"{word} fine" for word in WORDS[: wait - 1]]
    assert found[wait - 1].startswith(f"{WORDS[wait - 1]} DistStoreError wait timeout after")
    if wait != 2:
        assert said in found[wait - 1]
    # The program has caught it, and goes on.
    if wait > 1:
        assert found[wait:] == [f"{word} fine" for word in WORDS[wait:]]
    other = lines(captured.out, 0)
    if wait in (1, 5):  # where ranks make a group the other waits for this one, in vain
        assert other.pop(wait - 1).startswith(f"{WORDS[wait - 1]} DistStoreError wait timeout")
        expected = [] if wait == 1 else [word for word in WORDS if word != "group"]
    else:
        expected = WORDS
    assert other == [f"{word} fine" for word in expected]
    assert "did not happen" not in captured.err


def test_beyond_the_last_wait(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, PROGRAM)
    plan = "store-timeout rank=0 wait=7, store-timeout rank=1 wait=7"
    assert main(["torchrun", "--ranks", "2", "--faults", plan, path]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("did not happen: store-timeout") == 2
    for rank in (0, 1):
        assert lines(captured.out, rank) == [f"{word} fine" for word in WORDS]


def test_a_timeout_that_is_not_caught_ends_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = script(
        tmp_path,
        """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("end")
    """,
    )
    plan = "store-timeout rank=0 wait=1"
    assert main(["torchrun", "--ranks", "2", "--faults", plan, path]) == 1
    captured = capsys.readouterr()
    assert "Root Cause" in captured.err and "DistStoreError: wait timeout after" in captured.err
    assert "end" not in captured.out
    # A restart begins undisturbed.
    given = ["torchrun", "--ranks", "2", "--max-restarts", "1", "--faults", plan, path]
    assert main(given) == 0
    assert capsys.readouterr().out.count("end") == 2


REAL = """
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("localhost", 0, is_master=True)
store.set_timeout(timedelta(milliseconds=20))  # of its connection too, if given before
for call in (lambda: store.get("k"), lambda: store.wait(["k", "l"])):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, str(error).splitlines()[0])
"""


def test_the_exception_is_that_of_a_real_store() -> None:
    """The store is another process's: its thread would be in the forks of later tests."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REAL], capture_output=True, text=True
    )
    mine = [timed_out("get", "k", 0.02), timed_out("wait", ["k", "l"], 0.02)]
    said = [f"{type(each).__name__} {each}" for each in mine]
    assert done.stdout.splitlines() == said, done.stderr
