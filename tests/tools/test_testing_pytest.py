"""The pytest plugin beside pytest's options, processes, the documentation, and how it is loaded."""

from __future__ import annotations

import doctest
import os
import pdb
import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from tests.oracles.budget import slow
from tests.tools.inner_runs import HEAD, OPTIONS, PAGE, ROOT, Result, Run, python

pytest_plugins = "pytester"
pytestmark = pytest.mark.usefixtures("begun", "alone")

# ---------------------------------------------------------------- pytest's options


BODY = """
    @pytest.mark.ranks(3)
    def test_it(rank):
        secret = 100 + rank
        dist.barrier()
        assert rank != 1
"""


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


@pytest.mark.ranks(4)
def test_mean(rank):
    x = torch.full((3,), float(rank))
    work = dist.all_reduce(x, async_op=True)
    mean = x / 4
    work.wait()
    assert (x == 6).all()
"""


@pytest.mark.parametrize(
    ("chosen", "count"), [("not world", 17), *slow(("world", 1))], ids=["ranks", "processes"]
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
    assert len(blocks) == 3
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
