"""Modes, subclasses and the profiler see of a call what they see of gloo's."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

import gpusim
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.memory import bits_of
from tests.torch import dispatched_programs
from tests.torch.children import needs_linux
from tests.torch.distributed_programs import PROGRAMS, start
from tests.torch.gloo_ranks import Case, Found, gloo

pytestmark = needs_linux

BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def shown(result: torch.Tensor) -> Any:
    """A result in words: JSON, if it is that."""
    if result.dtype == torch.uint8:
        return json.loads(bytes(result.tolist()))
    return result.tolist()


def assert_like_gloo(cases: list[Case], folder: Path, **options: Any) -> None:
    folder.mkdir()
    for (name, ranks, arguments), expected in zip(cases, gloo(cases, folder), strict=True):
        ours: Found = launch(
            lambda rank, name=name, arguments=arguments: PROGRAMS[name](**arguments),
            ranks,
            reduction="gloo-ring",
            **options,
        )
        for rank, (real, mine) in enumerate(zip(expected, ours, strict=True)):
            assert real.keys() == mine.keys()
            for key, value in real.items():
                assert shown(value) == shown(mine[key]), (name, rank, key)


@BOTH
def test_modes_see_the_calls_of_gloo(processes: bool, tmp_path: Path) -> None:
    assert_like_gloo([("modes", 3, {})], tmp_path / "real", processes=processes)


@BOTH
def test_subclasses_do_as_in_gloo(processes: bool, tmp_path: Path) -> None:
    cases: list[Case] = [("subclasses", 2, {}), ("gradients_warn", 3, {})]
    assert_like_gloo(cases, tmp_path / "real", processes=processes)


@BOTH
def test_fake_tensors_and_counts_are_those_of_gloo(processes: bool, tmp_path: Path) -> None:
    cases: list[Case] = [("fake", 2, {}), ("counted", 2, {})]
    assert_like_gloo(cases, tmp_path / "real", processes=processes)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_modes_see_the_calls_of_gloo_at_other_sizes(ranks: int, tmp_path: Path) -> None:
    cases: list[Case] = [("counted", ranks, {}), ("fake", ranks, {})]
    cases += [("modes", ranks, {}), ("subclasses", ranks, {})] if ranks > 1 else []
    assert_like_gloo(cases, tmp_path / "real")


@pytest.mark.own_process
@BOTH
def test_profiles_have_the_events_of_gloo(processes: bool, tmp_path: Path) -> None:
    """All ranks profile at once."""
    cases: list[Case] = [("events", 3, {}), ("events", 2, {"profiles": "torch"})]
    assert_like_gloo(cases, tmp_path / "real", processes=processes)


@pytest.mark.own_process
@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_ranks_profile_at_the_same_time(schedule: str, tmp_path: Path) -> None:
    """Each has its own events and its own trace; profiles begin and end in any order."""
    from torch.profiler import profile, record_function

    def program(rank: int) -> list[list[str]]:
        start()
        found = []
        for turn in range(2):
            with profile(record_shapes=True) as own:
                dist.barrier()
                with record_function(f"step {rank}"):
                    dist.all_reduce(torch.ones(rank + 1)[:1])
                for _ in range((rank + turn) % 3):
                    torch.ones(2).add(1)
            path = tmp_path / f"{rank}.json"
            own.export_chrome_trace(str(path))
            traced = {each.get("name") for each in json.loads(path.read_text())["traceEvents"]}
            names = {each.name for each in own.events()}
            assert {"gloo:all_reduce", f"step {rank}"} <= names & traced
            found.append(sorted(each for each in names if each.startswith("step")))
            dist.barrier()
        return found

    assert launch(program, 3, schedule=schedule) == [[[f"step {r}"]] * 2 for r in range(3)]
    with profile() as after:
        torch.ones(2) + 1
    assert any(each.name == "aten::add" for each in after.events())


@pytest.mark.own_process
def test_a_launch_that_is_profiled_has_no_profiles_of_ranks() -> None:
    def program(rank: int) -> None:
        with torch.autograd.profiler.profile():
            pass

    with (
        torch.autograd.profiler.profile(),
        pytest.raises(gpusim.GpusimError, match=r"launches the ranks profiles now.*--processes"),
    ):
        launch(program, 2)


def test_no_address_is_taken_of_tensors_without_memory() -> None:
    with FakeTensorMode():
        fake = torch.ones(3)
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    wrapped = dispatched_programs.Wrapped(torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tensor in (fake, freed, wrapped):
            kind = type(tensor).__name__
            with pytest.raises(TypeError, match=rf"memory of its own, got a {kind} of shape \[3\]"):
                bits_of(tensor, "all_reduce")
    assert bits_of(torch.ones(0), "all_reduce").shape == (0,)


@BOTH
def test_operators_post_calls_for_ranks_alone(processes: bool) -> None:
    """torch.ops.c10d may be called directly; groups of others keep torch's kernels."""

    def program(rank: int) -> tuple[list[float], str]:
        start()
        world: Any = dist.group.WORLD
        x = torch.full((2,), 1.0 + rank)
        _, boxed = torch.ops.c10d.broadcast_([x], world.boxed(), 1, 0)
        dist.Work.unbox(boxed).wait()
        try:
            torch.ops.c10d.recv_([x], world.boxed(), 7, 0)
        except Exception as error:
            return x.tolist(), type(error).__name__
        return x.tolist(), "none"

    assert launch(program, 3, processes=processes) == [([2.0, 2.0], "RuntimeError")] * 3


def test_premultiplied_sums_are_dispatched_with_their_factor() -> None:
    def program(rank: int) -> list[float]:
        dist.init_process_group("nccl")
        x = torch.ones(2)
        with dispatched_programs.Seen() as mode:
            dist.all_reduce(x, dist._make_nccl_premul_sum(0.25))
        assert [name for name, _ in mode.calls] == ["c10d.allreduce_.default"]
        return x.tolist()

    assert launch(program, 3) == [[0.75, 0.75]] * 3
