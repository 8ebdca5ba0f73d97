"""`gpusim.testing.ranks`: tests of unittest.TestCase on simulated ranks, under any runner.

The decorator changes the class in place, so that `super()` means in it what it did. A test is run
by the class's own `run`, whose test method then runs the ranks. In a rank, a new instance of a
subclass of its own goes through `setUp`, the test, `tearDown` and the cleanups.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

from gpusim.maps.ending import ReplicaEnded
from gpusim.tools.testing import torch_cases
from gpusim.tools.testing.case_marks import MARK, TORCH, CaseMark, class_of_rank, exit_as_skip
from gpusim.tools.testing.copies import deep_copy, holds_data
from gpusim.tools.testing.failures import names, shown_trace, with_notes
from gpusim.tools.testing.mark import RanksMark
from gpusim.tools.testing.outcomes import RankedTest

__all__ = ["CaseTest", "Decorator", "install"]

__unittest = True  # unittest leaves the frames of such modules out of tracebacks

RUNS = "_gpusim_runs"
"""The attribute of an instance whose ranks are running; and of the instance of a rank."""


class Decorator:
    """The decorator that `ranks(...)` returns: of a unittest.TestCase, or of a method of one."""

    def __init__(self, mark: CaseMark, shown: str) -> None:
        self.mark, self.shown = mark, shown

    def __call__(self, target: Any) -> Any:
        if isinstance(target, type) and issubclass(target, unittest.TestCase):
            if target is unittest.TestCase:
                raise TypeError(f"{self.shown}: expected a class of yours, got unittest.TestCase")
            if issubclass(target, unittest.IsolatedAsyncioTestCase):
                raise TypeError(
                    f"{self.shown}: {target.__name__} has async tests; ranks need plain ones"
                )
            setattr(target, MARK, self.mark)
            install(target)
            return target
        name = getattr(target, "__qualname__", repr(target)[:60])
        within = name.rpartition(".")[0]
        if isinstance(target, type) or not callable(target) or within in ("", "<locals>"):
            raise TypeError(
                f"{self.shown}: {name} is not a unittest.TestCase, nor a method of one; "
                f"pytest.mark.{self.shown} is for functions and other classes"
            )
        if inspect.iscoroutinefunction(target):
            raise TypeError(f"{self.shown}: {name} is async; ranks need a plain method")
        return Method(target, self.mark, self.shown)


class Method:
    """A decorated method while its class is being made: the class is then told of it."""

    def __init__(self, function: Callable[..., Any], mark: CaseMark, shown: str) -> None:
        functools.update_wrapper(self, function)
        self.function, self.mark, self.shown = function, mark, shown

    def __set_name__(self, owner: type, name: str) -> None:
        if not issubclass(owner, unittest.TestCase):
            raise TypeError(
                f"{self.shown}: {owner.__name__} is not a unittest.TestCase; "
                f"pytest.mark.{self.shown} is for other classes"
            )
        own = {"function", "mark", "shown", "__wrapped__"}
        # What other decorators have set meanwhile, such as unittest's expectedFailure.
        vars(self.function).update({k: v for k, v in vars(self).items() if k not in own})
        setattr(self.function, MARK, self.mark)
        setattr(owner, name, self.function)
        install(owner)

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        name = self.function.__qualname__
        raise TypeError(f"{self.shown}: expected to be the outermost decorator of {name}")


# The class


def install(cls: type) -> None:
    """Let a class's `run` run its marked tests on ranks. Twice is once."""
    common = sys.modules.get(TORCH)
    if common is not None and MARK in vars(cls):
        if torch_cases.install(cls, common):
            return
    before = vars(cls).get("run")
    if getattr(before, MARK, False):
        return

    def run(self: Any, result: Any = None) -> Any:
        own = super(cls, self).run if before is None else before.__get__(self)  # type: ignore[arg-type]
        mark = None if RUNS in vars(self) else mark_of(self)
        if mark is None:
            return own(result)
        with joined(self, mark, result):
            return own(result)

    setattr(run, MARK, True)
    cls.run = run  # type: ignore[attr-defined]


def mark_of(case: Any) -> CaseMark | None:
    """The mark of a test: its method's, else its class's."""
    found: CaseMark | None = getattr(getattr(case, case._testMethodName, None), MARK, None)
    return found or getattr(type(case), MARK, None)


@contextlib.contextmanager
def joined(case: Any, mark: CaseMark, result: Any) -> Iterator[None]:
    """A block in which a test's method runs its ranks, and nothing is set up around it."""
    name = case._testMethodName
    method = getattr(case, name)

    @functools.wraps(method)
    def run_all(*_: Any) -> None:
        # pytest --pdb would call it later, for an instance that was not set up.
        if getattr(result, "_explicit_tearDown", None) is not None:
            result._explicit_tearDown = None
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise TypeError(f"ranks: {method.__qualname__} is async; ranks need a plain method")
        counts = mark.counts_of(case)
        for count in counts:
            own = mark.mark.on(count)
            with case.subTest(ranks=count) if len(counts) > 1 else contextlib.nullcontext():
                CaseTest(case, own, count, given).execute()

    # Attributes that fixtures of pytest have set: a new instance does not have them.
    given = {k: v for k, v in vars(case).items() if k not in (name, "tearDown")}
    replaced = {name: run_all, "setUp": nothing, "tearDown": nothing, RUNS: True}
    before = {key: vars(case)[key] for key in replaced if key in vars(case)}
    vars(case).update(replaced)
    try:
        yield
    finally:
        for key in replaced:
            del vars(case)[key]
        vars(case).update(before)


def nothing() -> None:
    """`setUp` and `tearDown` outside of the ranks."""


# A test


class Subtest(NamedTuple):
    """A failure in a subtest: its message, its parameters, and the exception."""

    message: Any
    params: dict[str, Any]
    error: BaseException


class Collected(unittest.TestResult):
    """The report of one rank's instance: exceptions, in the order of time."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        super().__init__()
        self.on_end = on_end
        self.raised: list[BaseException] = []
        # By text: ranks that fail in the same subtest are reported together.
        self.of_subtests: dict[str, Subtest] = {}

    def add(self, error: Any) -> None:
        """Take in the exception of an exc_info, once."""
        if not any(each is error[1] for each in self.raised):
            self.raised.append(error[1])
            if isinstance(error[1], ReplicaEnded):
                self.on_end()

    def addError(self, test: Any, err: Any) -> None:
        self.add(err)

    def addFailure(self, test: Any, err: Any) -> None:
        self.add(err)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.add(err)  # the test that has the ranks expects it

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is None:
            return
        if isinstance(err[1], ReplicaEnded):
            self.add(err)
        else:
            given = isinstance(subtest._message, str)  # else unittest's mark for none
            found = Subtest(subtest._message if given else None, dict(subtest.params), err[1])
            self.of_subtests.setdefault(subtest._subDescription(), found)


class CaseTest(RankedTest):
    """A method of a unittest.TestCase on its ranks."""

    def __init__(self, case: Any, mark: RanksMark, count: int, given: dict[str, Any]) -> None:
        super().__init__(mark, count)
        self.case, self.given = case, given
        self.collected: dict[int, Collected] = {}

    def fail(self, text: str) -> NoReturn:
        raise self.case.failureException(text)

    def execute(self) -> None:
        self.classes = [self.class_of(rank) for rank in range(self.count)]
        super().execute()

    def class_of(self, rank: int) -> type:
        """The class of one rank's instance. A `rank` of the class's own is left alone."""
        cls, own = type(self.case), {}
        for name, value in (("rank", rank), ("world_size", self.count)):
            if not hasattr(cls, name) or name == "world_size":
                own[name] = value
        return class_of_rank(cls, **own)

    def body(self, rank: int) -> None:
        """Go through the whole test in a rank, with an instance of its own."""
        case = self.classes[rank](self.case._testMethodName)
        memo: dict[int, Any] = {}
        for name, value in self.given.items():
            if name not in vars(case):
                vars(case)[name] = deep_copy(value, memo)[0] if holds_data(value) else value
        vars(case)[RUNS] = True
        collected = Collected(functools.partial(self.note_wait, rank))
        self.collected[rank] = collected
        case.run(collected)
        if collected.raised:
            # A rank that has failed may be ended later, as it waits in `tearDown`.
            first, *more = collected.raised
            more = [each for each in more if not isinstance(each, ReplicaEnded)]
            notes = [f"then {type(each).__name__}: {each}" for each in more]
            raise exit_as_skip(
                first if isinstance(first, ReplicaEnded) else with_notes(first, notes)
            )
        if collected.skipped and not collected.of_subtests:
            raise unittest.SkipTest(collected.skipped[0][1])

    def conclude(self, error: Any) -> None:
        """Report what has failed in subtests as subtests, and then the test."""
        found: dict[str, dict[int, Subtest]] = {}
        for rank, collected in sorted(self.collected.items()):
            for text, subtest in collected.of_subtests.items():
                found.setdefault(text, {})[rank] = subtest
        for by_rank in found.values():
            first = min(by_rank)
            message = () if by_rank[first].message is None else (by_rank[first].message,)
            with self.case.subTest(*message, **by_rank[first].params):
                self.raise_subtest(by_rank)
        super().conclude(error)

    def raise_subtest(self, by_rank: dict[int, Subtest]) -> NoReturn:
        """Raise the failure of a subtest's lowest rank, with notes on the others."""
        first, *others = sorted(by_rank)
        error = by_rank[first].error
        notes = [f"rank {first} of {self.count} failed"]
        notes += [f"{names(others)} failed too"] if others else []
        raise with_notes(error, notes).with_traceback(shown_trace(error.__traceback__))
