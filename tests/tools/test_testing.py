"""The pytest plugin: tests marked with `ranks`, run by pytester."""

from __future__ import annotations

import doctest
import os
import pdb
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpusim.torch.distributed import launch
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing.md").read_text()
pytest_plugins = "pytester"
HEAD = """
    import os, sys, threading, time, warnings, unittest
    import pytest, torch
    import torch.distributed as dist
    import numpy as np
    import gpusim
    from gpusim import lax
    from gpusim.reduction import current
"""
OPTIONS = ("-p", "pytest_gpusim", "-n0", "--strict-markers", "-Wignore")


@pytest.fixture(scope="module", autouse=True)
def begun() -> None:
    """Import what launches import: the inner runs forget modules that they import first."""

    def begin(rank: int) -> None:
        dist.init_process_group()
        model = DistributedDataParallel(torch.nn.Linear(1, 1))
        model(torch.ones(1, 1)).sum().backward()

    launch(begin, 2)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner runs take no options from the outer one's environment."""
    for name in os.environ:
        if name.startswith("PYTEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class Result:
    """An inner run: its output, and its outcomes by the names of tests."""

    def __init__(self, result: pytest.RunResult) -> None:
        self.result = result
        self.out = result.stdout.str()
        words = re.findall(
            r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) \S+?::(\S+)", self.out, re.M
        )
        self.outcomes = {name: word for word, name in words}

    def section(self, name: str) -> str:
        """The report of a test that failed."""
        found = re.search(
            rf"^_+ (?:ERROR at \w+ of )?{re.escape(name)} _+$(.*?)^[_=]{{5,}}",
            self.out,
            re.M | re.S,
        )
        assert found, self.out
        return found[1]


Run = Callable[..., Result]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run a file of tests."""

    def run(body: str, *options: str, head: str = HEAD) -> Result:
        pytester.makepyfile(head + body)
        return Result(pytester.runpytest_inprocess(*OPTIONS, "-rA", *options))

    return run


def test_runs_on_all_ranks(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(4)
    def test_torch(rank, world_size, tmp_path):
        assert (dist.get_rank(), dist.get_world_size(), world_size) == (rank, 4, 4)
        (tmp_path / str(rank)).touch()
        dist.barrier()
        assert len(list(tmp_path.iterdir())) == 4
        assert int(os.environ["RANK"]) == rank

    @pytest.mark.ranks(count=3, init=False)
    def test_no_init(rank):
        assert not dist.is_initialized()
        dist.init_process_group("nccl")

    @pytest.mark.ranks(3, init="nccl")
    def test_backend():
        assert dist.get_backend() == "nccl"

    @pytest.mark.ranks(3, axis="i")
    def test_lax(rank, world_size):
        assert lax.axis_index("i") == rank and world_size == 3
        assert lax.psum(np.float32(rank), "i") == 3

    @pytest.mark.ranks(2)
    class TestClass:
        def test_inside(self, rank):
            assert rank == dist.get_rank() and dist.get_world_size() == 2

        @pytest.mark.ranks(5)
        def test_closest(self):
            assert dist.get_world_size() == 5
        """
    )
    assert result.outcomes == dict.fromkeys(
        (
            "test_torch",
            "test_no_init",
            "test_backend",
            "test_lax",
            "TestClass::test_inside",
            "TestClass::test_closest",
        ),
        "PASSED",
    )


@pytest.mark.parametrize("schedule", ["turns", "free"])
@pytest.mark.parametrize("axis", [None, "i"])
def test_sums_are_added_as_the_mark_says(run: Run, schedule: str, axis: str | None) -> None:
    call = (
        "(dist.all_reduce(x := torch.tensor([X[rank]], dtype=torch.float16)), x.item())[1]"
        if axis is None
        else 'lax.psum(np.float16(X[rank]), "i").item()'
    )
    result = run(
        f"""
    X = [2048, 1, 1, 1]
    MARK = dict(axis={axis!r}, schedule={schedule!r})

    @pytest.mark.ranks(4, **MARK)
    def test_linear(rank):
        assert {call} == 2048

    @pytest.mark.ranks(4, order="reverse", **MARK)
    def test_order(rank):
        assert {call} == 2052  # 2051 is halfway

    @pytest.mark.ranks(4, reduction=gpusim.Reduction(accumulate="float32"), **MARK)
    def test_reduction(rank):
        assert {call} == 2052
        """
    )
    assert result.outcomes == dict.fromkeys(
        ("test_linear", "test_order", "test_reduction"), "PASSED"
    )


def test_reduction_can_be_a_function(run: Run) -> None:
    result = run(
        """
    def choose(call):
        return "reverse" if call.operation == "all_reduce" else "linear"

    @pytest.mark.ranks(4, reduction=choose)
    def test_order(rank):
        x = torch.tensor([[2048, 1, 1, 1][rank]], dtype=torch.float16)
        dist.all_reduce(x)
        assert x == 2052
        """
    )
    assert result.outcomes == {"test_order": "PASSED"}


def test_counts_make_tests_with_readable_names(run: Run) -> None:
    body = """
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.ranks([1, 2, 4])
    def test_size(dtype, rank):
        assert dist.get_world_size() != 2

    @pytest.fixture
    def doubled(world_size):
        return 2 * world_size

    @pytest.mark.ranks([2, 3], axis="i")
    def test_lax(world_size, doubled):
        assert lax.axis_size("i") == world_size == doubled / 2
    """
    result = run(body)
    names = {
        f"test_size[ranks{n}-{dtype}]": n for n in (1, 2, 4) for dtype in ("float32", "bfloat16")
    }
    expected = {name: "FAILED" if n == 2 else "PASSED" for name, n in names.items()}
    expected |= {"test_lax[ranks2]": "PASSED", "test_lax[ranks3]": "PASSED"}
    assert result.outcomes == expected
    assert set(run(body, "-k", "ranks4").outcomes) == {name for name, n in names.items() if n == 4}
    again = run(body, "--lf").outcomes
    assert set(again) == {name for name, n in names.items() if n == 2}
    assert len(run(body, "-x").outcomes) < len(expected)


# ---------------------------------------------------------------- failures


def test_one_rank_fails(run: Run) -> None:
    result = run(
        """
    def check(x, rank):
        assert x[0] == rank

    @pytest.mark.ranks(8)
    def test_it(rank):
        print("hello", rank)
        x = torch.full((3,), float(rank))
        dist.all_reduce(x)
        if rank == 3:
            check(x, rank)
        dist.all_reduce(x)
        """
    )
    text = result.section("test_it")
    assert "assert tensor(28.) == 3" in text
    assert "rank = 3" in text
    (others,) = re.findall(r"^E +(ranks .*)$", text, re.M)
    assert others == (
        "ranks 0-2, 4-7 waited in all_reduce(float32[3], SUM, linear), call 1 of group '0' "
        f"(ranks 0 to 7) at {others.rpartition(' at ')[2]}"
    )
    assert re.search(r" at test_one_rank_fails\.py:\d+$", others)
    lines = Path("test_one_rank_fails.py").read_text().splitlines()
    assert lines[int(others.rpartition(":")[2]) - 1] == "    dist.all_reduce(x)"
    assert "E       rank 3 of 8 failed" in text
    assert re.findall(r"^> +(.*)$", text, re.M) == ["check(x, rank)", "assert x[0] == rank"]
    assert "gpusim/" not in text and "threading" not in text
    assert all(f"[rank{rank}]: hello {rank}" in text for rank in range(8))


@pytest.mark.parametrize("capture", ["no", "sys", "fd"])
def test_output_has_the_tags_of_ranks(run: Run, capture: str) -> None:
    result = run(
        """
    @pytest.mark.ranks(2)
    def test_it(rank):
        print("some of", end="")
        dist.barrier()
        print(" a line", rank)
        sys.stderr.write("error without an end")
        assert rank != 1
        """,
        f"--capture={capture}",
    )
    for rank in range(2):
        assert f"[rank{rank}]: some of a line {rank}\n" in result.out
    found = result.out + result.result.stderr.str()
    assert all(f"[rank{rank}]: error without an end" in found for rank in range(2))


def test_all_ranks_fail(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(8)
    def test_it(rank):
        dist.barrier()
        assert {"a": 1} == {"a": 2}
        """
    )
    text = result.section("test_it")
    assert "rank 0 of 8 failed" in text and "ranks 1-7 failed at the same line" in text
    assert "{'a': 1} != {'a': 2}" in text  # pytest's own comparison


def test_ranks_end_in_several_ways(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(7)
    def test_it(rank):
        if rank == 0:
            raise ValueError("zero")
        if rank == 1:
            raise TypeError("one, and\\nmore")
        if rank == 3:
            pytest.skip("three")
        if rank in (4, 5):
            return
        dist.recv(torch.ones(3), 0)

    @pytest.mark.ranks(20)
    def test_many(rank):
        assert rank
        dist.recv(torch.ones(3), (rank + 1) % 20)
        """
    )
    notes = re.findall(r"^E +(ranks? .*)$", result.section("test_it"), re.M)
    assert notes[0] == "rank 0 of 7 failed"
    assert re.fullmatch(r"rank 1 failed with TypeError at \S+\.py:\d+: one, and", notes[1])
    assert re.fullmatch(
        r"ranks 2, 6 waited in recv from rank 0 of float32\[3\].* at \S+:\d+", notes[2]
    )
    assert notes[3:] == ["ranks 4, 5 passed", "rank 3 skipped the test (three)"]
    many = re.findall(r"^E +(.*)$", result.section("test_many"), re.M)
    assert len(many) == 8 and many[-1] == "and 14 more lines like these"


def test_lax_failures(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(4, axis="i")
    def test_assertion(rank):
        total = lax.psum(np.float32(1), "i")
        assert rank != 2
        lax.pmean(total, "i")

    @pytest.mark.ranks(4, axis="i")
    def test_mismatch(rank):
        lax.psum(np.ones(2 + (rank == 2)), "i")

    @pytest.mark.ranks(4, axis="i")
    def test_deadlock(rank):
        if rank:
            lax.psum(np.ones(2), "i")
        """
    )
    text = result.section("test_assertion")
    assert "rank = 2" in text and "rank 2 of 4 failed" in text
    assert re.search(r"ranks 0, 1, 3 waited in pmean at test_lax_failures\.py:\d+$", text, re.M)
    text = result.section("test_mismatch")
    assert "replica 2 calls lax.psum" in text and 'lax.psum(np.ones(2 + (rank == 2)), "i")' in text
    text = result.section("test_deadlock")
    assert "replicas 1, 2, 3 of axis 'i' wait in lax.psum" in text and "replica 0 returned" in text
    assert '>           lax.psum(np.ones(2), "i")' in text and "shown: rank 1 of 4" in text


def test_mismatch_and_deadlock_are_named_at_once(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(4)
    def test_mismatch(rank):
        x = torch.ones(3)
        if rank == 2:
            dist.broadcast(x, 0)
        dist.all_reduce(x)

    @pytest.mark.ranks(4)
    def test_deadlock(rank):
        if rank != 2:
            dist.reduce_scatter_tensor(torch.ones(1), torch.ones(4))

    @pytest.mark.ranks(4)
    def test_skipped(rank):
        if rank == 2:
            pytest.skip("why")
        dist.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.xfail(raises=gpusim.DeadlockError, strict=True)
    def test_expected(rank):
        if rank:
            dist.barrier()
        """
    )
    assert result.outcomes.pop("test_expected") == "XFAIL"
    assert set(result.outcomes.values()) == {"FAILED"}
    text = result.section("test_mismatch")
    assert "rank 0 calls all_reduce" in text and "rank 2 calls broadcast" in text
    assert re.findall(r"^> +(.*)$", text, re.M) == ["dist.all_reduce(x)"]
    text = result.section("test_deadlock")
    assert "ranks 0, 1, 3 wait in reduce_scatter" in text and "rank 2 has returned" in text
    sites = set(re.findall(r" at (\S+):\d+; rank 2", text))
    assert {Path(site).name for site in sites} == {
        "test_mismatch_and_deadlock_are_named_at_once.py"
    }
    assert len(re.findall(r"^> ", text, re.M)) == 1
    assert "rank 2 skipped the test (why)" in result.section("test_skipped")


def test_errors_of_gpusim_end_in_the_test(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2, order="mpich")
    def test_it(rank):
        dist.reduce_scatter_tensor(torch.ones(3), torch.ones(6))
        """
    )
    text = result.section("test_it")
    assert re.findall(r"^> +(.*)$", text, re.M) == [
        "dist.reduce_scatter_tensor(torch.ones(3), torch.ones(6))"
    ]
    assert "order of mpich's reduce_scatter is not known" in text
    assert "rank 0 of 2 failed" in text and "rank 1 failed at the same line" in text


def test_free_ranks_end_as_soon_as_one_fails(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2, schedule="free")
    def test_it(rank):
        assert rank
        while True:  # for what never comes
            time.sleep(0.001)
        """
    )
    text = result.section("test_it")
    assert "rank 0 of 2 failed" in text
    assert re.search(r"rank 1 (was at|had not begun)", text)


def test_skip_and_xfail(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(3)
    def test_all_skip(rank):
        pytest.skip("no data")

    @pytest.mark.ranks(3)
    def test_unittest_skip(rank):
        raise unittest.SkipTest("no data")

    @pytest.mark.ranks(3)
    @pytest.mark.skipif(True, reason="never")
    def test_skipif(rank):
        pass

    @pytest.mark.ranks(3)
    def test_one_skips(rank):
        if rank == 1:
            pytest.skip("no data")

    @pytest.mark.ranks(3)
    @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
    def test_xfail(rank):
        1 / (rank - 1)

    @pytest.mark.ranks(3)
    @pytest.mark.xfail(raises=ZeroDivisionError, strict=True)
    def test_other(rank):
        assert rank

    @pytest.mark.ranks(3)
    @pytest.mark.xfail(strict=True)
    def test_passes(rank):
        pass

    @pytest.mark.ranks(3)
    def test_imperative(rank):
        dist.barrier()
        if rank == 1:
            pytest.xfail("known")
        dist.barrier()

    @pytest.mark.ranks(3)
    def test_fail(rank):
        if rank == 1:
            pytest.fail("by hand")

    @pytest.mark.ranks(3)
    def test_raises(rank):
        dist.barrier()
        with pytest.raises(ValueError, match=f"^{rank}$"):
            dist.barrier()
            raise ValueError(rank)
        """
    )
    result.result.assert_outcomes(passed=1, failed=4, skipped=3, xfailed=2)
    assert result.outcomes["test_xfail"] == result.outcomes["test_imperative"] == "XFAIL"
    text = result.section("test_one_skips")
    assert (
        "rank 1 skipped the test (no data); ranks 0, 2 did not: expected all 3 ranks to skip the "
        "test, or none" in text
    )
    assert "by hand" in (text := result.section("test_fail")) and "rank 1 of 3 failed" in text
    assert "rank 0 of 3 failed" in result.section("test_other")
    assert "XPASS(strict)" in result.section("test_passes")


def test_a_test_that_returns_warns(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2)
    def test_it(rank):
        return rank == 5
        """,
        "-Wdefault",
    )
    assert "PytestReturnNotNoneWarning" in result.out and "bool" in result.out


# ---------------------------------------------------------------- fixtures


def test_fixtures(run: Run) -> None:
    result = run(
        """
    evaluated = []

    @pytest.fixture
    def model():
        evaluated.append("model")
        yield torch.nn.Linear(2, 1)
        evaluated.append("end")

    @pytest.fixture
    def optimizer(model):
        return torch.optim.SGD(model.parameters(), 0.1)

    @pytest.fixture
    def found():
        return []

    @pytest.mark.ranks(3)
    @pytest.mark.parametrize("given", [{"x": [np.zeros(2), torch.zeros(2)]}])
    def test_copies(rank, model, optimizer, given, found):
        assert evaluated == ["model"]
        assert optimizer.param_groups[0]["params"][0] is model.weight
        with torch.no_grad():
            model.weight.fill_(rank)
        given["x"][0][0] = given["x"][1][0] = rank
        found.append(rank)
        dist.barrier()
        assert (model.weight == rank).all()
        assert given["x"][0][0] == given["x"][1][0] == rank
        assert sorted(found) == [0, 1, 2]

    def test_ended():
        assert evaluated == ["model", "end"]

    @pytest.fixture
    def computed():
        return torch.ones(3, requires_grad=True) * 2

    @pytest.mark.ranks(3)
    def test_no_copy(computed):
        pass

    @pytest.fixture
    def broken():
        raise ValueError("no data")

    @pytest.mark.ranks(3)
    def test_broken(broken):
        pass

    @pytest.fixture
    def asks(rank):
        pass

    @pytest.mark.ranks(3)
    def test_asks(asks):
        pass

    def test_unmarked(rank):
        pass

    def test_unmarked_size(world_size):
        pass
        """
    )
    expected = {"test_copies[given0]": "PASSED", "test_ended": "PASSED", "test_no_copy": "FAILED"}
    errors = ("test_broken", "test_asks", "test_unmarked", "test_unmarked_size")
    assert result.outcomes == expected | dict.fromkeys(errors, "ERROR")
    assert "the argument 'computed' has no copy for each rank" in result.section("test_no_copy")
    assert "no data" in result.section("test_broken")
    assert "can be an argument of a test only" in result.section("test_asks")
    assert "marked with pytest.mark.ranks" in result.section("test_unmarked")
    assert "marked with pytest.mark.ranks" in result.section("test_unmarked_size")


def test_a_fixture_of_the_users_own_with_the_name_rank(run: Run) -> None:
    result = run(
        """
    @pytest.fixture
    def rank():
        return "mine"

    @pytest.mark.ranks(2)
    def test_it(rank):
        assert rank == "mine"
        """
    )
    assert result.outcomes == {"test_it": "PASSED"}


def test_monkeypatch_leaves_nothing_behind(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OTHER", "before")
    result = run(
        """
    @pytest.mark.ranks(3)
    def test_patches(rank, monkeypatch, tmp_path):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.chdir(tmp_path / str(rank))
        monkeypatch.setenv("RANK", "77")
        monkeypatch.setenv("OTHER", str(rank))
        monkeypatch.delenv("WORLD_SIZE")
        monkeypatch.setattr(unittest, "new", rank, raising=False)
        dist.barrier()
        assert os.getcwd() == str(tmp_path / str(rank))
        assert os.environ["RANK"] == "77" and os.environ["OTHER"] == str(rank)
        assert "WORLD_SIZE" not in os.environ

    def test_after():
        assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ
        assert os.environ["OTHER"] == "before" and not hasattr(unittest, "new")
        """
    )
    assert result.outcomes == {"test_patches": "PASSED", "test_after": "PASSED"}


def test_capsys_by_rank(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(3)
    def test_it(rank, capsys):
        print("I am", rank)
        dist.barrier()
        print("error", rank, file=sys.stderr)
        assert capsys.readouterr() == (f"I am {rank}\\n", f"error {rank}\\n")
        assert capsys.readouterr().out == ""
        print("rest")
        assert rank != 1

    @pytest.mark.ranks(3)
    def test_threads(rank, capsys):
        thread = threading.Thread(target=lambda: print("of a thread of", rank))
        thread.start()
        thread.join()
        print("own")
        assert capsys.readouterr().out == f"of a thread of {rank}\\nown\\n"

    @pytest.mark.ranks(3)
    def test_disabled(capsys):
        with capsys.disabled():
            pass

    @pytest.mark.ranks(3)
    def test_capfd(capfd):
        pass

    @pytest.mark.ranks(3)
    def test_subtests(subtests):
        pass

    def test_after(capsys):
        print("x")
        assert capsys.readouterr().out == "x\\n"
        """
    )
    text = result.section("test_it")
    assert "rank 1 of 3 failed" in text and "ranks 0, 2 passed" in text
    assert sorted(re.findall(r"^\[rank\d\]: .*$", text, re.M)) == [
        f"[rank{n}]: rest" for n in range(3)
    ]
    assert result.outcomes["test_threads"] == "PASSED"
    assert "capsys.disabled() does not work in a rank" in result.section("test_disabled")
    assert "cannot share the fixture 'capfd'; capsys works" in result.section("test_capfd")
    assert "cannot share the fixture 'subtests'" in result.section("test_subtests")
    assert result.outcomes["test_after"] == "PASSED"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "missing 1 required positional argument: 'count'"),
        ("0", "count=0: expected an integer from 1, or a list of them"),
        ("True", "count=True: expected"),
        ("2.0", "count=2.0: expected"),
        ("[]", r"count=\[\]: expected"),
        ("[1, 'a']", "count=.*: expected"),
        ("[2, 2]", "expected different numbers of ranks"),
        ("2, ordre='ring'", "unexpected keyword argument 'ordre'"),
        ("2, order='butterfly'", "order='butterfly': expected an order"),
        ("2, order=''", "order='': expected the name of an order"),
        ("2, order=3", "order=3: expected a name"),
        ("2, order='ring', reduction='ring'", "expected one of them"),
        ("2, reduction=3", "reduction: expected a gpusim.Reduction"),
        ("2, reduction=len, axis='i'", "expected a gpusim.Reduction"),
        ("2, schedule='one'", "schedule='one': expected 'turns' or 'free'"),
        ("2, init=3", "init=3: expected True, False"),
        ("2, init=False, axis='i'", "init=False: expected no axis"),
        ("2, init=False, processes=True", "init=False: expected no processes"),
        ("2, axis=1", "axis=1: expected the name of an axis"),
        ("2, axis='i', processes=True", "axis='i': expected no processes"),
        ("2, processes=1", "processes=1: expected True or False"),
        ("2, processes=True, schedule='free'", "schedule='free': expected no processes"),
    ],
)
def test_wrong_arguments_are_errors_of_the_collection(
    run: Run, arguments: str, message: str
) -> None:
    result = run(
        f"""
    @pytest.mark.ranks({arguments})
    def test_it():
        pass
        """
    )
    result.result.assert_outcomes(errors=1)
    assert "Interrupted: 1 error during collection" in result.out
    assert re.search(rf"::test_it: pytest\.mark\.ranks: .*{message}", result.out), result.out
    assert "Traceback" not in result.out


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("async def test_it(): pass", "got an async one"),
        ("@given(integers())\n    def test_it(x): pass", "hypothesis would draw other examples"),
        (
            "class TestIt(unittest.TestCase):\n        def test_it(self): pass",
            "got a TestCaseFunction",
        ),
    ],
)
def test_tests_that_cannot_be_marked(run: Run, test: str, message: str) -> None:
    result = run(
        f"""
    from hypothesis import given
    from hypothesis.strategies import integers
    pytestmark = pytest.mark.ranks(2)

    {test}
        """
    )
    result.result.assert_outcomes(errors=1)
    assert f"pytest.mark.ranks: {message}" in result.out or message in result.out


def test_trace_is_refused(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2)
    def test_it(rank):
        pass
        """,
        "--trace",
    )
    assert "--trace works with one rank; use breakpoint() or --pdb" in result.out


# ---------------------------------------------------------------- pytest's options


BODY = """
    @pytest.mark.ranks(3)
    def test_it(rank):
        secret = 100 + rank
        dist.barrier()
        assert rank != 1
"""


def python(*arguments: str, folder: Path, stdin: str = "") -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    return done.stdout + done.stderr


def test_pdb_gets_the_frames_of_the_rank_that_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    class Debugger(pdb.Pdb):
        def interaction(self, frame: Any, trace: Any = None) -> None:
            while trace.tb_next is not None:
                trace = trace.tb_next
            frame = trace.tb_frame
            found.append((frame.f_code.co_name, frame.f_locals["rank"], frame.f_locals["secret"]))

    monkeypatch.setattr(pdb, "Debugger", Debugger, raising=False)
    result = run(BODY, "--pdb", "--pdbcls=pdb:Debugger")
    assert found == [("test_it", 1, 101)]
    assert result.outcomes == {"test_it": "FAILED"}


@pytest.mark.parametrize(
    ("stop", "typed", "parts"),
    slow(
        ("assert rank != 1", "p secret\nq\n", ["-> assert rank != 1", "rank 1 of 3 failed"]),
        ("if rank == 1: breakpoint()", "p secret\nc\n", ["1 passed"]),
        ("if rank == 1: breakpoint()", "p secret\nq\n", ["Quitting debugger"]),
    ),
    ids=["--pdb", "continue", "quit"],
)
def test_debugger(pytester: pytest.Pytester, stop: str, typed: str, parts: list[str]) -> None:
    after = f"{stop}\n        dist.barrier()"
    pytester.makepyfile(HEAD + BODY.replace("assert rank != 1", after))
    out = python("-m", "pytest", *OPTIONS, "--pdb", folder=pytester.path, stdin=typed)
    for part in ["(Pdb) 101", *parts]:
        assert part in out


def test_xdist(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from gpusim import lax

        @pytest.mark.ranks([1, 2, 4], axis="i")
        def test_lax(rank, world_size):
            assert lax.psum(1, "i") == world_size
            assert world_size != 4 or rank != 1
        """
    )
    out = python("-m", "pytest", *OPTIONS, "-n2", "-rA", folder=pytester.path)
    assert "1 failed, 2 passed" in out
    assert "rank 1 of 4 failed" in out and "ranks 0, 2, 3 passed" in out
    assert "PASSED test_xdist.py::test_lax[ranks2]" in out


def test_markers_explain_the_mark(run: Run, pytester: pytest.Pytester) -> None:
    out = pytester.runpytest_inprocess(*OPTIONS, "--markers").stdout.str()
    assert "@pytest.mark.ranks(count, *, order=None" in out
    out = pytester.runpytest_inprocess("-n0", "-p", "no:pytest_gpusim", "--markers").stdout.str()
    assert "ranks" not in out


# ---------------------------------------------------------------- processes


WORLD = """
    def test_before():
        pass

    @pytest.mark.ranks(2, processes=True, order="reverse")
    def test_it(rank, world_size, capfd):
        print("hello", rank)
        with gpusim.World.from_environment() as world:
            assert (world.instance, world.instances, world_size) == (rank, 2, 2)
            y = gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(np.ones(1))
            assert y == 2 and current().reduction.order == "reverse"
            INSIDE
        OUTSIDE
"""
FAILS = ["rank = 1", "assert 1 != 1", "rank 1", "of 2 failed", "poprun: instance", "hello 1"]


@pytest.mark.parametrize(
    ("inside", "outside", "parts"),
    [
        ("pass", "assert rank != 1", FAILS),
        *slow(
            ("pass", "pass", []),
            ("assert rank != 1", "pass", FAILS),
            ("os.kill(os.getpid(), 9 * rank)", "pass", ["the processes ended with", "SIGKILL"]),
            ("pass", "rank and pytest.skip('no')", ["rank 1 skipped the test, rank 0 did not"]),
        ),
    ],
    ids=["fails", "passes", "fails inside", "killed", "skips"],
)
def test_world(
    run: Run, pytester: pytest.Pytester, inside: str, outside: str, parts: list[str]
) -> None:
    pytester.makepyfile(test_zz="def test_after(): pass")  # for which the first file's setup ends
    result = run(WORLD.replace("INSIDE", inside).replace("OUTSIDE", outside))
    passed = dict.fromkeys(("test_before", "test_after"), "PASSED")
    assert result.outcomes == {"test_it": "FAILED" if parts else "PASSED", **passed}
    for part in parts:
        assert part in result.section("test_it")


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    slow(("strict=True", "XFAIL"), ("raises=ValueError, strict=True", "FAILED")),
)
def test_one_of_two_processes_fails_as_expected(run: Run, arguments: str, outcome: str) -> None:
    result = run(
        f"""
    @pytest.mark.xfail({arguments})
    @pytest.mark.ranks(2, processes=True)
    def test_it(rank):
        assert rank == 0
        """
    )
    assert result.outcomes == {"test_it": outcome}


# ---------------------------------------------------------------- the page


FAILING = """\
import pytest
import torch
import torch.distributed as dist

@pytest.mark.ranks(8)
def test_broadcast(rank):
    x = torch.full((3,), float(rank))
    print("before:", x[0].item())
    dist.broadcast(x, 0)
    if rank == 3:
        assert x[0] == rank
    dist.barrier()

@pytest.mark.ranks(4)
def test_checkpoint(rank):
    if rank == 0:
        torch.save({}, "model.pt")
        dist.barrier()
"""


@pytest.mark.parametrize(
    ("chosen", "count"), [("not world", 15), *slow(("world", 1))], ids=["ranks", "processes"]
)
def test_the_pages_examples_pass(pytester: pytest.Pytester, chosen: str, count: int) -> None:
    examples = re.findall(r"^```py\n(.*?)^```$", PAGE, re.M | re.S)
    pytester.makepyfile("\n".join(examples))
    result = Result(pytester.runpytest_inprocess(*OPTIONS, "-rA", "-k", chosen))
    assert set(result.outcomes.values()) == {"PASSED"} and len(result.outcomes) == count


def test_failures_look_as_the_page_shows(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_page=FAILING)
    out = Result(pytester.runpytest_inprocess(*OPTIONS)).out
    blocks = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(blocks) == 2
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for block in blocks:
        shown = re.sub(r"_{5,}", "_____", f"...{block}...")
        assert doctest.OutputChecker().check_output(shown, re.sub(r"_{5,}", "_____", out), flags), (
            out
        )


# ---------------------------------------------------------------- loading


def test_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (entry,) = project["project"]["entry-points"]["pytest11"].items()
    assert entry == ("pytest_gpusim", "pytest_gpusim")
    assert (ROOT / "pytest_gpusim.py").exists()
    assert "pytest_gpusim.py" in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def test_loaded_twice_it_is_one_plugin(pytester: pytest.Pytester) -> None:
    """By its entry point, as if installed, and by -p."""
    info = pytester.mkdir("site") / "gpusim-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gpusim\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\npytest_gpusim = pytest_gpusim\n")
    pytester.makepyfile(
        """
        def test_it(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("pytest_gpusim")
        """
    )
    paths = os.pathsep.join([str(info.parent), str(ROOT)])
    for more in ([], ["-p", "pytest_gpusim"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n0", *more],
            cwd=pytester.path,
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        assert "1 passed" in done.stdout, done.stdout + done.stderr


def test_pytest_starts_without_gpusim_and_collects_without_torch(
    pytester: pytest.Pytester,
) -> None:
    heavy = "{name for name in ('gpusim', 'numpy', 'torch') if name in sys.modules}"
    show = f"import sys\ndef test_loaded():\n    print({heavy})"
    pytester.makepyfile(test_plain=show)
    plugins = ("-p", "pytest_gpusim", "-n0", "-s", "-p", "no:hypothesispytest")
    assert "set()" in python("-m", "pytest", *plugins, folder=pytester.path)
    marked = "import pytest\n" + show.replace("def", "@pytest.mark.ranks(2, axis='i')\ndef")
    pytester.makepyfile(test_plain=marked)
    out = python("-m", "pytest", *plugins, folder=pytester.path)
    assert "1 passed" in out and "'gpusim'" in out and "'torch'" not in out


def test_ranks_are_threads_of_pytests_process(run: Run) -> None:
    """So a test of 8 ranks starts nothing: some 50 ms with DDP on a quiet machine."""
    out = run(
        """
    @pytest.mark.ranks(8)
    def test_it(rank):
        print("PROCESS", os.getpid(), os.getppid())
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        model(torch.ones(2, 8)).sum().backward()
    """,
        "-s",
    ).out
    ranks = re.findall(r"PROCESS (\d+) (\d+)", out)
    assert len(ranks) == 8 and len(set(ranks)) == 1
