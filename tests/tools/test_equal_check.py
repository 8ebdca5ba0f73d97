"""`gpusim.equal.check` and `watch`, and the mark's argument `equals`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpusim.equal import check, watch
from gpusim.errors import DeadlockError, ReplicaError
from gpusim.tools.equal.checking import Verdict
from tests.tools.inner_runs import Run

pytest_plugins = "pytester"
pytestmark = [
    pytest.mark.usefixtures("begun", "alone"),
    pytest.mark.skipif(sys.platform != "linux", reason="ranks are processes of Linux"),
]


def train(
    rank: int,
    reduced: bool = True,
    steps: int = 2,
    wrong_from: int = 0,
    data: Callable[[int], torch.Tensor] | None = None,
) -> None:
    """Data-parallel training by hand, which forgets to reduce the first weight's gradient."""
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(12, 5, generator=draw).tensor_split(ranks)[rank]
        optimizer.zero_grad()
        model(x if data is None else data(rank)).square().mean().backward()
        forgotten = not reduced and step >= wrong_from
        with torch.no_grad():
            for parameter in list(model.parameters())[forgotten:]:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks
        optimizer.step()


# ---------------------------------------------------------------- check


@pytest.mark.parametrize("dtype", ["float64", "keep"])
def test_the_same_function_on_more_ranks(dtype: str) -> None:
    verdict = check(train, ranks=3, dtype=dtype)
    assert isinstance(verdict, Verdict) and verdict.equal is True
    assert verdict.text.startswith("EQUAL: the program on 3 ranks computes")
    assert verdict.record["equal"] is True
    assert (verdict.record["ranks"], verdict.record["reference_ranks"]) == (3, 1)
    assert verdict.record["tensors"] == verdict.record["related"] > 20


def test_a_difference_is_an_assertion_with_the_report() -> None:
    with pytest.raises(AssertionError) as raised:
        check(train, ranks=3, args=(False,))
    text = str(raised.value)
    assert text.startswith(
        "DIFFERENT: the first tensor that is not the reference's is the weight gradient of "
        "0.weight, step 0.\n  reason: never reduced"
    )
    assert re.search(r"last collective before it: all_reduce of ranks 0, 1, 2 at .*\.py:\d+", text)


def test_two_functions() -> None:
    def wrapped(rank: int, reduced: bool) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(x.tensor_split(dist.get_world_size())[rank]).square().mean().backward()
            optimizer.step()

    verdict = check(train, wrapped, 4, (True,), reference_ranks=2, reduction="reverse")
    assert (verdict.record["ranks"], verdict.record["reference_ranks"]) == (4, 2)
    with pytest.raises(AssertionError, match=r"weight gradient of 0\.weight, step 0"):
        check(wrapped, train, 2, (False,))


@pytest.mark.parametrize(("reference", "ranks"), [(2, 4), (2, 3), (3, 2), (4, 3)])
def test_a_reference_on_several_ranks(reference: int, ranks: int) -> None:
    """Their numbers need not divide each other."""
    assert check(train, ranks=ranks, reference_ranks=reference).equal
    with pytest.raises(AssertionError, match=r"weight gradient of 0\.weight, step 0"):
        check(train, lambda rank: train(rank, False), ranks, reference_ranks=reference)


def test_steps_after_which_functions_end() -> None:
    assert check(train, ranks=2, args=(False, 4, 2), steps=2).equal
    with pytest.raises(AssertionError, match="step 2"):
        check(train, ranks=2, args=(False, 4, 2), steps=3)
    with pytest.raises(AssertionError, match="step 2"):
        check(train, ranks=2, args=(False, 4, 2))


def test_a_later_stage_that_waits_when_the_first_has_ended() -> None:
    def stages(rank: int) -> None:
        dist.init_process_group("gloo")
        whole = dist.get_world_size() == 1
        model = nn.ModuleDict()
        for n in range(2) if whole else [rank]:
            torch.manual_seed(n)
            model[str(n)] = nn.Linear(*((5, 7), (7, 3))[n])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            if whole:
                model["1"](model["0"](torch.ones(4, 5))).square().mean().backward()
            elif rank == 0:
                y = model["0"](torch.ones(4, 5))
                dist.send(y.detach(), 1)
                gradient = torch.empty_like(y)
                dist.recv(gradient, 1)
                y.backward(gradient)
            else:
                x = torch.empty(4, 7)
                dist.recv(x, 0)
                model["1"](x.requires_grad_()).square().mean().backward()
                assert x.grad is not None
                dist.send(x.grad, 0)
            optimizer.step()

    assert check(stages, ranks=2, steps=2).equal
    assert check(stages, ranks=2).equal


def test_functions_run_in_processes_of_their_own(tmp_path: Path) -> None:
    """This process stays as it was: its dtypes, its hooks, its variables."""
    seen: list[int] = []
    call, backward = nn.Module.__call__, torch.Tensor.backward

    def run(rank: int) -> None:
        seen.append(rank)
        assert torch.float32 is torch.float64 is torch.get_default_dtype()
        (tmp_path / f"{dist.get_world_size() if dist.is_initialized() else 0}").touch()
        train(rank)

    check(run, ranks=2)
    assert seen == [] and list(tmp_path.iterdir())
    assert torch.float32 is not torch.float64 and torch.get_default_dtype() is torch.float32
    assert nn.Module.__call__ is call and torch.Tensor.backward is backward
    assert "RANK" not in os.environ


def test_functions_that_fail() -> None:
    def fail(rank: int, at: int) -> None:
        train(rank)
        if dist.get_world_size() == at:
            raise KeyError("layer 7")

    for ranks in (1, 2):
        with pytest.raises(ReplicaError, match="KeyError: 'layer 7'"):
            check(fail, ranks=2, args=(ranks,))

    def wait(rank: int) -> None:
        train(rank)
        if rank:
            dist.recv(torch.ones(1), 0)

    with pytest.raises(DeadlockError, match="recv from rank 0"):
        check(wait, ranks=2)


def test_functions_without_an_answer() -> None:
    def own_data(rank: int) -> torch.Tensor:
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(rank))

    with pytest.raises(ValueError, match="read different data"):
        check(train, ranks=2, args=(True, 2, 0, own_data))
    with pytest.raises(ValueError, match=r"compared|nothing|no weight"):
        check(lambda rank: None, ranks=2)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"dtype": "float16"}, r"dtype='float16': expected one of \('float64', 'keep'\)"),
        ({"dtype": "auto"}, "dtype='auto': expected one of"),
        ({"steps": -1}, "steps=-1: expected an integer from 0"),
        ({"steps": True}, "steps=True: expected an integer from 0"),
        ({"steps": 1.5}, r"steps=1\.5: expected an integer from 0"),
        ({"ranks": 0}, "ranks=0"),
        ({"reference_ranks": 0}, "ranks=0"),
        ({"reduction": "sideways"}, "sideways"),
        ({"device": "abacus"}, "abacus"),
    ],
    ids=str,
)
def test_wrong_arguments_of_check(named: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        check(train, **named)


# ---------------------------------------------------------------- watch


def test_watch_does_nothing_elsewhere() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert watch("scores", x) is x
    for name in (None, 3, b"scores"):
        with pytest.raises(TypeError, match="watch: name="):
            watch(name, x)


def test_a_watched_tensor_and_its_gradient() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * (2 if dist.get_rank() else 1)

    def run(rank: int, wrong: str) -> None:
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(5, 3))
        x = torch.linspace(0, 1, 30).reshape(6, 5).tensor_split(dist.get_world_size())[rank]
        for n in range(2):  # the second has the same name
            y = model(x).tanh()
            y = watch("scores", y + (1e-3 * rank if wrong == "value" and n else 0))
            y = Double.apply(y) if wrong == "gradient" and n else y * 1
            y.square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert check(run, ranks=2, args=("",)).equal
    with pytest.raises(AssertionError, match="scores, call 2, step 0"):
        check(run, ranks=2, args=("value",))
    with pytest.raises(AssertionError, match=r"gradient of .*scores, call 2, step 0"):
        check(run, ranks=2, args=("gradient",))


# ---------------------------------------------------------------- the mark

BODY = """
    from torch import nn

    def train(rank, forgotten=0, x=None):
        ranks = dist.get_world_size()
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        x = torch.linspace(0, 1, 60).reshape(12, 5) if x is None else x
        model(x.tensor_split(ranks)[rank]).square().mean().backward()
        for parameter in list(model.parameters())[forgotten:]:
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        torch.optim.SGD(model.parameters(), lr=0.1).step()
"""


def test_marked_tests(run: Run) -> None:
    result = run(
        BODY
        + """
    @pytest.mark.ranks(3, equals=1)
    def test_equal(rank):
        train(rank)

    @pytest.mark.ranks(3, equals=1)
    def test_different(rank):
        train(rank, 1)

    @pytest.mark.ranks([2, 4], equals=2, order="reverse")
    def test_counts(rank, world_size):
        assert rank < dist.get_world_size() <= world_size
        train(rank)

    @pytest.mark.ranks(2, equals=1, init=False)
    def test_init():
        dist.init_process_group("gloo")
        train(dist.get_rank())

    @pytest.mark.ranks(2, equals=1, init="nccl")
    def test_backend(rank):
        assert dist.get_backend() == "nccl"
        train(rank)

    @pytest.mark.ranks(2, equals=1)
    def test_fixtures(rank, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("RANK_OF_TEST", str(rank))
        (tmp_path / f"{dist.get_world_size()}-{rank}").touch()
        train(rank)

    @pytest.mark.ranks(2, equals=1)
    class TestClass:
        def test_inside(self, rank):
            train(rank)

    @pytest.mark.ranks(2, equals=1)
    def test_raises(rank):
        with pytest.raises(ZeroDivisionError):
            1 / 0
        train(rank)

    @pytest.mark.ranks(2, equals=1)
    def test_fails(rank):
        train(rank)
        assert rank != 1, "rank one"

    @pytest.mark.xfail(strict=True)
    @pytest.mark.ranks(2, equals=1)
    def test_expected(rank):
        train(rank, 1)

    @pytest.mark.ranks(2, equals=1)
    def test_nothing():
        pass
        """
    )
    expected = {
        "test_equal": "PASSED",
        "test_different": "FAILED",
        "test_counts[ranks2]": "PASSED",
        "test_counts[ranks4]": "PASSED",
        "test_init": "PASSED",
        "test_backend": "PASSED",
        "test_fixtures": "PASSED",
        "TestClass::test_inside": "PASSED",
        "test_raises": "PASSED",
        "test_fails": "FAILED",
        "test_nothing": "FAILED",
    }
    text = result.section("test_different")
    assert "weight gradient of weight, step 0" in text and "never reduced" in text
    assert "rank one" in result.section("test_fails")
    assert "compared" in result.section("test_nothing")
    assert result.outcomes.pop("test_expected") == "XFAIL"
    assert result.outcomes == expected


def test_a_test_that_all_ranks_skip_is_skipped(run: Run) -> None:
    result = run(
        """
    @pytest.mark.ranks(2, equals=1)
    def test_skipped():
        pytest.skip("not here")
        """
    )
    assert result.outcomes == {} and "1 skipped" in result.out


def test_tensors_of_fixtures_are_float64_too(run: Run) -> None:
    result = run(
        BODY
        + """
    @pytest.fixture
    def x():
        return torch.linspace(0, 1, 30).reshape(6, 5)

    @pytest.mark.ranks(2, equals=1)
    def test_fixture(rank, x):
        assert x.dtype == torch.float32
        train(rank, x=x)
        """
    )
    assert result.outcomes == {"test_fixture": "PASSED"}, result.out[-2000:]


def test_the_documentations_example(run: Run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "equal.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page.split("## In tests")[1], re.DOTALL)[:1]
    wrong = example.replace(
        "DistributedDataParallel(torch.nn.Linear(3, 2))", "torch.nn.Linear(3, 2)"
    )
    assert example != wrong
    assert run("", head=example).outcomes == {"test_training": "PASSED"}
    assert run("", head=wrong).outcomes == {"test_training": "FAILED"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("2, equals=0", "equals=0: expected a number of ranks from 1"),
        ("2, equals=True", "equals=True: expected a number of ranks"),
        ("2, equals='1'", "equals='1': expected a number of ranks"),
        ("2, equals=[1]", r"equals=\[1\]: expected a number of ranks"),
        ("2, equals=1, axis='i'", "equals=1: expected no axis"),
        ("2, equals=1, processes=True", "equals=1: expected no processes"),
        ("2, equals=1, schedule='free'", "equals=1: expected schedule='turns'"),
        ("2, equals=1, order='butterfly'", "order='butterfly': expected an order"),
    ],
)
def test_wrong_arguments_of_the_mark(run: Run, arguments: str, message: str) -> None:
    result = run(
        f"""
    @pytest.mark.ranks({arguments})
    def test_it():
        pass
        """
    )
    result.result.assert_outcomes(errors=1)
    assert re.search(rf"::test_it: pytest\.mark\.ranks: .*{message}", result.out), result.out
