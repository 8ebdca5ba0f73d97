"""PyTorch's classes of tests on simulated ranks: those of its module `common_distributed`.

Each starts its ranks in `setUp`, and waits for them in the test's method. Here `setUp` starts
nothing, and the method runs the ranks; all else is the class's own. So a rank runs the test's
method alone, as PyTorch's do, and code that a suite has overridden is called.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import types
from collections.abc import Callable
from typing import Any, NoReturn

from gpusim.tools.testing.case_marks import MARK, CaseMark, class_of_rank, exit_as_skip
from gpusim.tools.testing.outcomes import RankedTest

__all__ = ["install"]

__unittest = True  # unittest leaves the frames of such modules out of tracebacks


def install(cls: type, common: Any) -> bool:
    """Change a class in place if it is one of PyTorch's, or is built on one."""
    for base, change in (
        (common.MultiProcessTestCase, of_processes),
        (common.MultiThreadedTestCase, of_threads),
        (common.MultiProcContinuousTest, of_workers),
    ):
        if issubclass(cls, base):
            for name, value in change(base).items():
                setattr(cls, name, value)
            count = getattr(cls, MARK).count
            if count is not None:
                cls.world_size = count  # type: ignore[attr-defined]
            return True
    return False


class TorchTest(RankedTest):
    """A test of a class of PyTorch's: `run` is what a rank calls, with its own class."""

    def __init__(
        self,
        case: Any,
        function: Callable[..., Any],
        run: Callable[[type, int, int, Any], None],
    ) -> None:
        mark: CaseMark = getattr(type(case), MARK)
        if len(mark.mark.counts) > 1:
            raise TypeError(f"ranks({mark.count!r}): expected one number of ranks for PyTorch's")
        count = int(case.world_size)
        super().__init__(mark.mark.on(count, init=False), count)
        self.case, self.function, self.run = case, function, run
        codes: dict[Any, int] = getattr(case, "special_return_code_checks", {})
        self.expected_code = codes.get(function, 0)
        self.any_code = function in getattr(case, "skip_return_code_checks", ())

    def fail(self, text: str) -> NoReturn:
        raise self.case.failureException(text)

    def execute(self) -> None:
        self.classes = [class_of_rank(type(self.case)) for _ in range(self.count)]
        super().execute()

    def body(self, rank: int) -> None:
        pipe = Texts()
        try:
            self.run(self.classes[rank], rank, self.count, pipe)
        except SystemExit as ended:
            raised = exit_as_skip(ended)
            if raised is not ended:
                raise raised from None
            code = ended.code if ended.code is not None else 0
            if self.any_code or code == self.expected_code:
                return
            texts = "".join(f"\n{text}" for text in pipe.texts)
            error = RuntimeError(
                f"rank {rank} ended with exit code {code!r}: expected {self.expected_code}{texts}"
            )
            raise error.with_traceback(ended.__traceback__) from None


class Texts:
    """The end of a pipe that a rank sends its traceback to."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def send(self, text: str) -> None:
        self.texts.append(text)

    def close(self) -> None:
        """Nothing is open."""


def joins(base: Any, waits: Callable[[Any, Any], None], main: int) -> Callable[..., Any]:
    """The method that wraps a test's: in the main process it runs the ranks."""

    def wrap(self: Any, function: Any) -> Any:
        @functools.wraps(function)
        def method(case: Any) -> None:
            if case.rank == main:
                waits(case, function)
            else:
                function()

        return types.MethodType(method, self)

    return wrap


# MultiProcessTestCase


def of_processes(base: Any) -> dict[str, Any]:
    """Methods in place of those that start the processes of a test."""

    def start(self: Any, *_: Any) -> None:
        self.processes = []

    def wait(case: Any, function: Any) -> None:
        name, file = case._current_test_name(), case.file_name

        def run(cls: Any, rank: int, count: int, pipe: Texts) -> None:
            cls._run(rank, name, file, pipe, fake_pg=getattr(case, "fake_pg", False))

        TorchTest(case, function, run).execute()

    replaced = {
        "_spawn_processes": start,
        "_fork_processes": start,
        "_start_processes": start,
        "join_or_run": joins(base, wait, base.MAIN_PROCESS_RANK),
    }
    return replaced | {"run_test": run_in_process}


def run_in_process(self: Any, test_name: str, parent_pipe: Any) -> None:
    """The test in a rank, as `MultiProcessTestCase.run_test` runs it."""
    seed()
    getattr(self, test_name)()
    if self.destroy_pg_upon_exit:
        destroy()


def seed() -> None:
    """Seed a rank's generators, as PyTorch seeds them before each test."""
    from gpusim.torch.private import seed_of_tests

    seed_of_tests()


def destroy() -> None:
    """Destroy the process group, which the test may have done."""
    from torch import distributed as dist

    with contextlib.suppress(AssertionError, ValueError):
        dist.destroy_process_group()


# MultiThreadedTestCase


def of_threads(base: Any) -> dict[str, Any]:
    """Methods in place of those that start the threads of a test, and their process group."""

    def start(self: Any) -> None:
        self.threads = []

    def wait(case: Any, function: Any) -> None:
        name = case._current_test_name

        def run(cls: Any, rank: int, count: int, pipe: Texts) -> None:
            cls._run(name, rank, count)

        TorchTest(case, function, run).execute()

    return {
        "_spawn_threads": start,
        "join_or_run": joins(base, wait, base.MAIN_THREAD_RANK),
        "run_test_with_threaded_pg": run_in_thread,
    }


def run_in_thread(self: Any, test_name: str, rank: int, world_size: int) -> None:
    """The test in a rank, as `MultiThreadedTestCase.run_test_with_threaded_pg` runs it."""
    from torch import distributed as dist

    dist.init_process_group()
    self.perThreadSetUp()
    try:
        getattr(self, test_name)()
    finally:
        destroy()
        self.perThreadTearDown()


# MultiProcContinuousTest


def of_workers(base: Any) -> dict[str, Any]:
    """Methods in place of those that start the processes of a class."""

    def start(cls: Any, world_size: int) -> None:
        cls.processes, cls.task_queues, cls.completion_queues = [], [], []
        with tempfile.NamedTemporaryFile(delete=False) as file:  # tearDownClass removes it
            cls.rdvz_file = file.name

    def wait(case: Any, function: Any) -> None:
        name = case._testMethodName
        folder = tempfile.TemporaryDirectory(prefix="gpusim-tests-")

        def run(cls: Any, rank: int, count: int, pipe: Texts) -> None:
            cls.rank, cls.world_size = rank, count
            cls._init_pg(rank, count, os.path.join(folder.name, "group"))
            own = cls(name)
            own.rank, own.world_size = rank, count
            seed()
            getattr(own, name)()
            destroy()

        with folder:
            TorchTest(case, function, run).execute()

    return {
        "_spawn_processes": classmethod(start),
        "_worker_run_main_wait": joins(base, wait, base.MAIN_PROCESS_RANK),
    }
