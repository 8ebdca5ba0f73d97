"""Tests of unittest.TestCase on simulated ranks; functions of pytest have `pytest.mark.ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpusim.reduction import ReductionLike
    from gpusim.tools.testing.cases import Decorator

__all__ = ["ranks"]


def ranks(
    count: int | Sequence[int] | None = None,
    *,
    order: str | None = None,
    reduction: ReductionLike | None = None,
    schedule: str = "turns",
    init: bool | str = True,
    axis: str | None = None,
    check: bool | str = True,
    device: str | None = None,
) -> Decorator:
    """Decorate a unittest.TestCase, or a method of one: its tests run on simulated ranks.

    In each rank, a thread, an instance of its own goes through `setUp`, the test, `tearDown` and
    the cleanups. It has `self.rank` and `self.world_size`, and the default process group is
    initialised. `setUpClass` and `setUpModule` run once, before the ranks. Any runner runs the
    tests: `python -m unittest`, pytest, a script that calls `unittest.main()`.

    A class of PyTorch's (`MultiProcessTestCase`, `MultiThreadedTestCase`, `MultiProcContinuousTest`
    and what is built on them) keeps its own course: ranks run the method alone, which initialises
    the group, and `world_size` is the class's.

    **Arguments**: those of `pytest.mark.ranks`, and of `launch` of `gpusim.torch.distributed`.

    - `count`: the number of ranks; several make a subtest of each. None is the class's
      `world_size`.
    - `order`, `reduction`: how sums are added.
    - `schedule`: "turns" or "free".
    - `init`: False leaves `init_process_group` to the test; a name is the backend's.
    - `axis`: the name of an axis runs the test in `gpusim.pmap`, without torch.
    - `check`: False leaves out the check of programs whose ranks agree.
    - `device`: "cpu" lets the CPU play the GPUs that the test asks for.

    **Returns**: a decorator, which returns the class that it gets, changed in place.

    **Raises**: TypeError or ValueError for other arguments, for a function, and for async tests.

    >>> import unittest
    >>> import torch, torch.distributed as dist
    >>> from gpusim.testing import ranks
    >>> @ranks(4, order="ring")
    ... class TestMean(unittest.TestCase):
    ...     def test_mean(self):
    ...         x = torch.tensor([float(self.rank)])
    ...         dist.all_reduce(x, dist.ReduceOp.AVG)
    ...         self.assertEqual(x.item(), 1.5)
    >>> result = unittest.TestResult()
    >>> TestMean("test_mean").run(result).wasSuccessful(), result.testsRun
    (True, 1)
    """
    from gpusim.tools.testing.case_marks import CaseMark
    from gpusim.tools.testing.cases import Decorator
    from gpusim.tools.testing.mark import RanksMark

    given: dict[str, Any] = {
        "order": order,
        "reduction": reduction,
        "schedule": schedule,
        "init": init,
        "axis": axis,
        "check": check,
        "device": device,
    }
    if callable(count) or isinstance(count, type):
        raise TypeError("ranks: expected ranks(N) or ranks(), with parentheses")
    try:
        mark = RanksMark(1 if count is None else count, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"ranks: {error}") from None
    return Decorator(CaseMark(count, mark), f"ranks({'' if count is None else repr(count)})")
