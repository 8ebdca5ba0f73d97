"""torch.distributed's additions in PyTorch 2.14; `make test-newest` runs these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim import ReplicaError
from gpusim.torch.distributed import launch
from tests.torch.turns_limits import SECOND, said

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "gather_single"), reason="this PyTorch is older than 2.14"
)
BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
newer: Any = dist  # annotations of older versions lack the names


def gathered(rank: int, backend: str) -> list[Any]:
    dist.init_process_group(backend)
    size, found = dist.get_world_size(), []
    for root, shape in enumerate([(), (2,), (0, 3), (1, 2)]):
        here, x = rank == root % size, torch.full(shape, rank + 0.5)
        output = torch.empty(size, *shape) if here else None
        work = newer.gather_single(x, output, root % size, async_op=bool(root % 2))
        if work is not None:
            work.wait()
        found.append(output)
    return found


@BOTH
@pytest.mark.parametrize("size", [1, 3])
def test_a_gather_into_one_tensor_stacks_what_ranks_have(size: int, processes: bool) -> None:
    found = launch(gathered, size, ("nccl",), processes=processes)
    for root, shape in enumerate([(), (2,), (0, 3), (1, 2)]):
        expected = torch.stack([torch.full(shape, rank + 0.5) for rank in range(size)])
        for rank in range(size):
            mine = found[rank][root]
            assert torch.equal(mine, expected) if rank == root % size else mine is None


@BOTH
def test_gloo_has_no_gather_into_one_tensor(processes: bool) -> None:
    with pytest.raises(ReplicaError, match="Backend gloo does not support gather_single"):
        launch(gathered, 2, ("gloo",), processes=processes)


@BOTH
def test_a_groups_limit_may_be_set_later(processes: bool) -> None:
    def program(rank: int) -> str:
        dist.init_process_group("gloo")
        newer.set_timeout(SECOND)
        return "" if rank else said(lambda: dist.all_reduce(torch.ones(1)))

    assert "Timed out waiting 1000ms" in launch(program, 2, processes=processes)[0]


@BOTH
def test_objects_travel_without_pickle(processes: bool) -> None:
    def program(rank: int) -> list[Any]:
        dist.init_process_group("gloo")
        found: list[Any] = [None] * dist.get_world_size()
        newer.all_gather_object(found, {"rank": rank, "error": ValueError("x")}, weights_only=True)
        return [(each["rank"], repr(each["error"])) for each in found]

    expected = [(rank, "ValueError('x')") for rank in range(3)]
    assert launch(program, 3, processes=processes) == [expected] * 3


def test_what_would_not_reach_simulated_calls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> list[str]:
        dist.init_process_group("gloo")
        group: Any = dist.group.WORLD
        assert not group.supports_window and not group.supports_reconfigure
        names = ["abort", "post", "pre"]
        hooks = [lambda n=n: getattr(group, f"register_{n}_hook")(0, print) for n in names]
        return [said(each) for each in [*hooks, lambda: group.new_window(torch.ones(1))]]

    for text in launch(program, 1)[0]:
        assert "of process groups is not simulated" in text
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    with pytest.raises(ReplicaError, match="TORCH_DIST_NAN_CHECK=1 has no effect"):
        launch(program, 1)
