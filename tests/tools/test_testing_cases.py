"""`gpusim.testing.ranks`: methods of unittest.TestCase on simulated ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

import pytest

from gpusim.testing import ranks
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE
from tests.tools.inner_runs import OPTIONS, PAGE, ROOT, python

pytest_plugins = "pytester"
pytestmark = pytest.mark.usefixtures("alone")

HEAD = """
import os, sys, unittest
import torch, torch.distributed as dist
from gpusim.testing import ranks
"""
BODY = """
calls = []

@ranks(3, order="nccl-tree")
class TestPlain(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        calls.append("class")
        cls.weight = torch.zeros(2)

    def setUp(self):
        super(TestPlain, self).setUp()
        self.x = torch.full((2,), float(self.rank))
        self.addCleanup(calls.append, ("cleanup", self.rank))
        calls.append(("setUp", self.rank))

    def tearDown(self):
        dist.barrier()
        calls.append(("tearDown", self.rank))

    @classmethod
    def tearDownClass(cls):
        assert calls[0] == "class" and calls.count("class") == 1, calls
        for kind in ("setUp", "tearDown", "cleanup"):
            assert {(kind, rank) for rank in range(3)} <= set(calls), calls

    def test_sum(self):
        dist.all_reduce(self.x)
        self.assertEqual(self.x.tolist(), [3.0, 3.0])
        self.assertEqual(int(os.environ["RANK"]), self.rank)
        self.assertEqual(self.world_size, 3)
        self.weight += self.rank  # each rank's own copy
        dist.barrier()
        self.assertEqual(self.weight[0].item(), self.rank)

    def test_one_fails(self):
        dist.all_reduce(self.x)
        self.assertNotEqual(self.rank, 1, "not me")
        dist.all_reduce(self.x)

    def test_subtests(self):
        for number in range(3):
            with self.subTest("parity", number=number):
                self.assertFalse(number == 1 and self.rank)

    def test_skip(self):
        self.skipTest("no data")

    def test_some_skip(self):
        if self.rank:
            self.skipTest("no data")

    @unittest.skip("never")
    def test_static_skip(self):
        self.fail()

    @unittest.expectedFailure
    def test_expected_failure(self):
        self.assertEqual(self.rank, 0)

    @unittest.expectedFailure
    def test_unexpected_success(self):
        pass

    def test_mismatch(self):
        if self.rank == 2:
            dist.broadcast(self.x, 0)
        dist.all_reduce(self.x)

    def test_hang(self):
        def wait():
            dist.all_reduce(self.x)
        if self.rank == 0:
            dist.recv(self.x, 1)
        wait()

    def test_error_in_tear_down(self):
        self.addCleanup(os.remove, "is not there")

    async def test_async(self):
        pass

    @ranks([1, 2])
    def test_counts(self):
        self.assertEqual(dist.get_world_size(), self.world_size)
        self.assertNotEqual(self.world_size, 2)


class TestMethods(unittest.TestCase):
    @unittest.expectedFailure
    @ranks(2)
    def test_below(self):
        self.assertEqual(dist.get_world_size(), 3)

    @ranks(2, init="nccl", device="cpu")
    @unittest.skipIf(False, "")
    def test_above(self):
        x = torch.ones(2, device="cuda")
        dist.all_reduce(x)
        self.assertEqual((dist.get_backend(), x.tolist()), ("nccl", [2.0, 2.0]))

    @ranks(3, axis="i")
    def test_lax(self):
        from gpusim import lax
        self.assertEqual(lax.psum(self.rank, "i"), 3)

    def test_without(self):
        self.assertFalse(dist.is_initialized() or hasattr(self, "rank"))


@ranks()
class TestDeclared(unittest.TestCase):
    world_size = 2

    def test_it(self):
        self.assertEqual(dist.get_world_size(), 2)


class TestInherits(TestDeclared):
    world_size = 4

    def test_it(self):
        self.assertEqual((dist.get_world_size(), TestInherits.world_size), (4, 4))
"""
EXPECTED = {
    "TestPlain.test_sum": "ok",
    "TestPlain.test_one_fails": "FAIL",
    "TestPlain.test_skip": "skipped 'no data'",
    "TestPlain.test_some_skip": "FAIL",
    "TestPlain.test_static_skip": "skipped 'never'",
    "TestPlain.test_expected_failure": "expected failure",
    "TestPlain.test_unexpected_success": "unexpected success",
    "TestPlain.test_mismatch": "ERROR",
    "TestPlain.test_hang": "ERROR",
    "TestPlain.test_error_in_tear_down": "ERROR",
    "TestPlain.test_async": "ERROR",
    "TestMethods.test_below": "expected failure",
    "TestMethods.test_above": "ok",
    "TestMethods.test_lax": "ok",
    "TestMethods.test_without": "ok",
    "TestDeclared.test_it": "ok",
    "TestInherits.test_it": "ok",
}


def section(text: str, name: str) -> str:
    """The report of a test, of unittest."""
    found = re.search(
        rf"^(?:FAIL|ERROR): [^\n]*{re.escape(name)}[^\n]*\n-+\n(.*?)^[=-]{{20,}}$",
        text,
        re.M | re.S,
    )
    assert found, text
    return found[1]


def test_unittest_runs_them(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(HEAD + BODY)
    out = python("-W", "ignore", "-m", "unittest", "-v", "test_it", folder=tmp_path)
    words = r"(ok|FAIL|ERROR|skipped '.*'|expected failure|unexpected success)$"
    found = dict(re.findall(rf"^\w+ \(test_it\.(\w+\.\w+)\) \.\.\. {words}", out, re.M))
    assert found == EXPECTED

    text = section(out, "test_one_fails")
    assert 'self.assertNotEqual(self.rank, 1, "not me")' in text and "1 == 1 : not me" in text
    assert "rank 1 of 3 failed" in text
    assert "ranks 0, 2 waited in all_reduce(float32[2], SUM, nccl-tree), call 1" in text
    assert "gpusim/" not in text and "unittest/" not in text
    text = section(out, "test_subtests) [parity] (number=1)")
    assert "rank 1 of 3 failed\nrank 2 failed too" in text
    assert "(number=0)" not in out and "(number=2)" not in out
    text = section(out, "test_some_skip")
    assert "ranks 1, 2 skipped the test (no data); rank 0 did not: expected all 3 ranks" in text
    text = section(out, "test_mismatch")
    assert "CollectiveMismatchError" in text and "they differ in operation" in text
    assert re.search(r"rank 2:\n  test_it\.py:\d+ in test_mismatch: dist.broadcast", text)
    text = section(out, "test_hang")  # the stacks of all ranks
    assert "DeadlockError" in text and "dist.recv(self.x, 1)" in text and "shown: rank 0" in text
    assert re.search(
        r"ranks 1, 2:\n  test_it\.py:\d+ in test_hang: wait\(\)\n"
        r"  test_it\.py:\d+ in wait: dist\.all_reduce\(self\.x\)",
        text,
    )
    assert "FileNotFoundError" in section(out, "test_error_in_tear_down")
    assert "TestPlain.test_async is async; ranks need a plain" in section(out, "test_async")
    assert "2 == 2" in section(out, "test_counts) (ranks=2)") and "(ranks=1)" not in out


@pytest.mark.parametrize("processes", ["0", *slow("2")])
def test_pytest_runs_them(pytester: pytest.Pytester, processes: str) -> None:
    pytester.makepyfile(test_it=HEAD + BODY)
    out = python("-m", "pytest", *OPTIONS, "-n", processes, "-rA", folder=pytester.path)
    words = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "FAILED", "expected failure": "XFAIL"}
    for name, word in EXPECTED.items():
        case, method = name.split(".")
        if not word.startswith(("skipped", "unexpected")):
            assert re.search(rf"^{words[word]} test_it\.py::{case}::{method}\b", out, re.M), out
    assert "rank 1 of 3 failed" in out and ">       self.assertNotEqual(self.rank, 1" in out
    assert re.search(r"^SUBFAILED\S* \(number='?1'?\) ", out, re.M)


FIXTURES = """
import pytest

@ranks(3)
class TestFixtures(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def given(self, tmp_path):
        self.folder, self.x = tmp_path, torch.zeros(1)

    def test_it(self):
        (self.folder / str(self.rank)).touch()
        self.x += self.rank
        dist.barrier()
        self.assertEqual(len(list(self.folder.iterdir())), 3)
        self.assertEqual(self.x.item(), self.rank)

    def test_skip(self):
        pytest.skip("no data")

    def tearDown(self):
        assert dist.is_initialized()

    def test_fails(self):
        self.assertNotEqual(self.rank, 2)
"""


def test_pytests_fixtures_and_debugger(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=HEAD + FIXTURES)
    typed = "p 100 + self.rank\nc\n"
    out = python("-m", "pytest", *OPTIONS, "--pdb", folder=pytester.path, stdin=typed)
    assert "1 failed, 1 passed, 1 skipped" in out and "(Pdb) 102" in out, out


# ---------------------------------------------------------------- what is refused


def function() -> None:
    """No method."""


class Other:
    def test_it(self) -> None:
        """Of no TestCase."""


class Plain(unittest.TestCase):
    def test_it(self) -> None:
        """A test."""


class Async(unittest.IsolatedAsyncioTestCase):
    """Async tests."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranks(0), "ranks: count=0: expected an integer from 1"),
        (lambda: ranks(2, order="butterfly"), "ranks: order='butterfly': expected"),
        (lambda: ranks(2, device="tpu"), "ranks: device='tpu': expected None, 'cpu' or 'cuda'"),
        (lambda: ranks(2, axis="i", device="cpu"), "device='cpu': expected no axis"),
        (lambda: ranks(Plain), "expected ranks(N) or ranks(), with parentheses"),  # type: ignore[arg-type]
        (lambda: ranks(2)(function), "pytest.mark.ranks(2) is for functions and other classes"),
        (lambda: ranks(2)(Other), "Other is not a unittest.TestCase"),
        (lambda: ranks(2)(unittest.TestCase), "expected a class of yours"),
        (lambda: ranks(2)(Async), "Async has async tests"),
    ],
)
def test_wrong_uses_are_refused(call: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        call()  # type: ignore[operator]


def test_a_decorator_that_is_not_the_outermost_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        HEAD
        + """
import functools
def again(f):
    @functools.wraps(f)
    def wrapper(self):
        f(self)
    return wrapper

class TestIt(unittest.TestCase):
    @again
    @ranks(2)
    def test_it(self):
        pass

@ranks(3)
class TestTwice(unittest.TestCase):
    world_size = 2
    def test_it(self):
        pass

@ranks()
class TestNone(unittest.TestCase):
    def test_it(self):
        pass
"""
    )
    out = python("-W", "ignore", "-m", "unittest", "test_it", folder=tmp_path)
    assert "ranks(2): expected to be the outermost decorator of TestIt.test_it" in out
    assert "ranks(3): TestTwice.world_size is 2; give one of them" in out
    assert "ranks(): expected the number of ranks, or TestNone.world_size" in out
    assert "errors=3" in out


def test_it_imports_neither_pytest_nor_torch() -> None:
    program = (
        "import gpusim.testing as t, sys; t.ranks(2); print({'pytest', 'torch'} & {*sys.modules})"
    )
    assert python("-c", program, folder=ROOT) == "set()\n"


# ---------------------------------------------------------------- PyTorch's classes


def verdicts(folder: Path, *arguments: str) -> dict[str, dict[str, str]]:
    """Run `tests.tools.torch_suites`; its verdicts."""
    if importlib.util.find_spec("expecttest") is None:  # torch.testing's, for tests of texts
        (folder / "expecttest.py").write_text("from unittest import TestCase\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.tools.torch_suites", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return found


FEW = ("TestProcesses.test_one_fails", "TestProcesses.test_all_reduce", "TestDTensor.test_shard")


@pytest.mark.parametrize("names", [FEW, *slow(((),))], ids=["few", "all"])
def test_pytorchs_classes_have_the_verdicts_of_gloo_processes(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    simulated, real = (verdicts(tmp_path, *more, *names) for more in (["--simulated"], []))
    assert simulated["kinds"] == real["kinds"]
    assert len(real["kinds"]) == (len(names) or 36)
    text = simulated["texts"]["TestProcesses.test_one_fails"]
    assert "self.assertNotEqual(self.rank, 1)" in text and "rank 1 of 3 failed" in text
    assert "ranks 0, 2 waited in barrier()" in text and "torch_cases" not in text


def test_pytorchs_base_class_can_be_decorated_for_a_whole_run(pytester: pytest.Pytester) -> None:
    (pytester.path / "expecttest.py").write_text("from unittest import TestCase\n")
    pytester.makeconftest(
        """
        from torch.testing._internal.common_distributed import MultiProcessTestCase
        from gpusim.testing import ranks
        ranks()(MultiProcessTestCase)
        """
    )
    pytester.makepyfile(
        test_it="""
        import os, torch, torch.distributed as dist
        from torch.testing._internal.common_distributed import MultiProcessTestCase
        from torch.testing._internal.common_utils import run_tests

        class TestIt(MultiProcessTestCase):
            def setUp(self):
                super().setUp()
                self._spawn_processes()

            def test_pid(self):
                store = dist.FileStore(self.file_name, self.world_size)
                dist.init_process_group("gloo", store=store, rank=self.rank, world_size=4)
                pids = [None] * 4
                dist.all_gather_object(pids, os.getpid())
                self.assertEqual(len(set(pids)), 1)
        """
    )
    out = python("-m", "pytest", *OPTIONS, folder=pytester.path)
    assert "1 passed" in out, out


def test_the_pages_suite_passes(pytester: pytest.Pytester) -> None:
    """The class of PyTorch's, and the conftest.py that takes in all."""
    if importlib.util.find_spec("expecttest") is None:
        (pytester.path / "expecttest.py").write_text("from unittest import TestCase\n")
    text = PAGE.partition("\n### PyTorch's own")[2].partition("\n## ")[0]
    files = dict(re.findall(r'^```\{\.py title="(.*?)"\}\n(.*?)^```$', text, re.M | re.S))
    assert sorted(files) == ["conftest.py", "test_dtensor.py"]
    for name, content in files.items():
        (pytester.path / name).write_text(content)
    out = python("-m", "pytest", *OPTIONS, folder=pytester.path)
    assert "1 passed" in out, out


@pytest.mark.slow
def test_unchanged_suites_run_by_gpusim_run(tmp_path: Path) -> None:
    """Each rank is a process there."""
    if importlib.util.find_spec("expecttest") is None:
        (tmp_path / "expecttest.py").write_text("from unittest import TestCase\n")
    names = [f"tests.tools.torch_suites.{name}" for name in FEW]
    done = subprocess.run(
        [sys.executable, "-m", "gpusim", "run", "--summary", "-m", "unittest", "-v", *names],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    text = done.stdout + done.stderr
    assert "Ran 3 tests" in text and "FAILED (errors=1)" in text, text
    assert "all_reduce" in text and "process 1 exited with error code 10" in text.lower()
