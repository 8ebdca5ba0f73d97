"""The pytest plugin: how tests of ranks fail, skip and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools.inner_runs import Run

pytest_plugins = "pytester"
pytestmark = pytest.mark.usefixtures("begun", "alone")


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
    assert re.search(r"ranks? 0.* calls? all_reduce", text) and "rank 2 calls broadcast" in text
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
    assert re.search(r"rank 1 (was at|waited in|had not begun)", text)


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
