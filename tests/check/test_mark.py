"""`pytest.mark.ranks(check=)`: tests whose ranks all pass, and that are wrong."""

from __future__ import annotations

import pytest

from gpusim.tools.testing.mark import ENGINES, RanksMark
from gpusim.torch.distributed import checks
from tests.check.small import needs_linux
from tests.tools.conftest import alone, begun, run
from tests.tools.inner_runs import Run

pytest_plugins = "pytester"
pytestmark = [needs_linux, pytest.mark.usefixtures("begun", "alone")]
FIXTURES = (alone, begun, run)

EARLY = """
        x = torch.arange(3.0)
        work = dist.all_reduce(x, async_op=True)
        total = x.sum()
        work.wait()
"""


def test_a_test_with_findings_fails(run: Run) -> None:
    result = run(
        f"""
    @pytest.mark.ranks(3)
    def test_early(rank):
{EARLY}

    @pytest.mark.ranks(3, check=False)
    def test_unchecked(rank):
{EARLY}

    @pytest.mark.ranks(3)
    def test_right(rank):
        x = torch.arange(3.0)
        dist.all_reduce(x)
        assert x.sum() == 9
        """
    )
    assert result.outcomes == {
        "test_early": "FAILED",
        "test_unchecked": "PASSED",
        "test_right": "PASSED",
    }
    section = result.section("test_early")
    assert "check: 1 finding\n" in section and "read-before-wait at " in section
    assert "ranks 0 to 2" in section and "cure: call wait()" in section
    assert "gpusim/torch" not in section, section


def test_a_test_may_ask_no_more_than_that_its_calls_return(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2)
    def test_returns(rank):
        dist.all_reduce(torch.randn(3))
        """
    )
    assert result.outcomes == {"test_returns": "PASSED"}


def test_the_mark_names_an_engine(run: Run) -> None:
    body = """
        x = torch.ones(3, 2).t()
        dist.all_reduce(x)
        assert x.sum() == 12
    """
    result = run(
        f"""
    @pytest.mark.ranks(2, check="nccl")
    def test_nccl():
{body}

    @pytest.mark.ranks(2, check="gloo")
    def test_gloo():
{body}

    @pytest.mark.ranks(2)
    def test_own():
{body}
        """
    )
    passed = {"test_gloo": "PASSED", "test_own": "PASSED"}
    assert result.outcomes == {"test_nccl": "FAILED", **passed}
    assert "not-contiguous at " in result.section("test_nccl")


def test_a_failure_of_a_rank_is_the_failure(run: Run) -> None:
    """What the check has found is a note behind it."""
    result = run(
        f"""
    @pytest.mark.ranks(3)
    def test_both(rank):
{EARLY}
        assert rank != 1
        """
    )
    section = result.section("test_both")
    assert result.outcomes == {"test_both": "FAILED"}
    assert "assert 1 != 1" in section and "rank 1 of 3 failed" in section


def test_an_expected_failure_may_be_a_finding(run: Run) -> None:
    result = run(
        f"""
    @pytest.mark.xfail(strict=True)
    @pytest.mark.ranks(2)
    def test_expected(rank):
{EARLY}
        """
    )
    assert result.outcomes == {"test_expected": "XFAIL"}


def test_tests_of_several_counts_and_schedules(run: Run) -> None:
    result = run(
        f"""
    @pytest.mark.ranks([1, 2])
    def test_counts(rank):
{EARLY}

    @pytest.mark.ranks(2, schedule="free")
    def test_free(rank):
{EARLY}
        """
    )
    names = ("test_counts[ranks1]", "test_counts[ranks2]", "test_free")
    assert result.outcomes == dict.fromkeys(names, "FAILED")


def test_a_test_that_is_skipped_or_expects_an_error_is_not_blamed(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2)
    def test_skipped(rank):
        dist.all_reduce(torch.arange(3.0), async_op=True)
        pytest.skip("later")

    @pytest.mark.xfail(raises=gpusim.DeadlockError, strict=True)
    @pytest.mark.ranks(2)
    def test_hangs(rank):
        if rank:
            dist.barrier()
        """
    )
    assert result.outcomes["test_hangs"] == "XFAIL"
    assert "test_skipped" in result.out


@pytest.mark.parametrize("value", ["mpi", "", None, 1, 0, ["nccl"]])
def test_values_that_the_mark_refuses(value: object) -> None:
    with pytest.raises(ValueError, match="expected True, False, 'nccl' or 'gloo'"):
        RanksMark(2, check=value)


def test_the_mark_checks_unless_it_says_otherwise() -> None:
    assert RanksMark(2).check is True
    assert ENGINES == checks.ENGINES
