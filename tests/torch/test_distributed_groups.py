"""Groups that ranks make: of the same name, and of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim import CollectiveMismatchError
from gpusim.torch.distributed import Recorder, launch

AT_ONE_POSITION = [  # the group of each rank, and the sums of rank + 1 that real gloo gives
    ([[0], [1], [2], [3]], [1.0, 2.0, 3.0, 4.0]),
    ([[0], [1, 2], [1, 2], [3]], [1.0, 5.0, 5.0, 4.0]),
    ([[3, 0, 1], [3, 0, 1], [2], [3, 0, 1]], [7.0, 7.0, 3.0, 7.0]),
]


def sums_in_own_group(rank: int, members: list[list[int]]) -> float:
    dist.init_process_group()
    group = dist.new_group(members[rank])
    x = torch.tensor(rank + 1.0)
    dist.all_reduce(x, group=group)
    gathered: list[Any] = [None] * len(members[rank])
    dist.all_gather_object(gathered, rank, group=group)
    assert gathered == sorted(members[rank])
    return x.item()


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(("members", "sums"), AT_ONE_POSITION)
def test_ranks_make_groups_of_one_where_others_make_other_groups(
    members: list[list[int]], sums: list[float], processes: bool
) -> None:
    recorder = Recorder()
    assert launch(sums_in_own_group, 4, [members], recorder=recorder, processes=processes) == sums
    callers: dict[str, set[int]] = {}
    for call in recorder.calls:
        callers.setdefault(call.group, set()).add(call.rank)
    assert sorted(map(sorted, callers.values())) == sorted(
        map(list, {tuple(sorted(each)) for each in members})
    )


def test_disjoint_groups_of_several_ranks_at_one_position_are_an_error() -> None:
    # Real gloo mixes them up: they meet under one name.
    with pytest.raises(CollectiveMismatchError, match="do not make the same groups"):
        launch(sums_in_own_group, 4, [[[0, 1], [0, 1], [2, 3], [2, 3]]])


def halves_of_halves(rank: int, size: int) -> list[list[int]]:
    dist.init_process_group()
    half, _ = dist.new_subgroups(size)
    own, subgroups = dist.new_subgroups(1, group=half)
    assert own in subgroups
    return [dist.get_process_group_ranks(half), dist.get_process_group_ranks(own)]


@pytest.mark.parametrize("processes", [False, True])
@pytest.mark.parametrize(("ranks", "size"), [(6, 3), (3, 1), (4, 2)])
def test_subgroups_are_divided_into_groups_of_one(ranks: int, size: int, processes: bool) -> None:
    expected = [
        [list(range(rank - rank % size, rank - rank % size + size)), [rank]]
        for rank in range(ranks)
    ]
    assert launch(halves_of_halves, ranks, [size], processes=processes) == expected


def sums_in_splits(rank: int, on_mesh: bool) -> list[float]:
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", device_id=device)
    for members in ([0, 1, 2], [1, 2], [0, 3]):  # ranks are in different numbers of groups
        dist.new_group(members)
    if on_mesh:  # which torch splits where the world is bound to a device
        mesh = dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "inner"))
        groups: list[Any] = mesh.get_all_groups()
    else:
        half: Any = dist.split_group(split_ranks=[[0, 1], [3, 2]])
        groups = [half, dist.split_group(half, [[0], [1]]), dist.split_group(half, [[0, 1]])]
    sums = []
    for group in groups:
        x = torch.tensor(rank + 1.0)
        dist.all_reduce(x, group=group)
        sums.append(x.item())
    assert len({group.group_name for group in groups}) == len(groups)
    return sums


@pytest.mark.parametrize("processes", [False, True])
def test_splits_meet_whatever_groups_their_ranks_are_in(processes: bool) -> None:
    splits = launch(sums_in_splits, 4, [False], device="cpu", processes=processes)
    assert splits == [[3.0, 1.0, 3.0], [3.0, 2.0, 3.0], [7.0, 3.0, 7.0], [7.0, 4.0, 7.0]]
    mesh = launch(sums_in_splits, 4, [True], device="cpu", processes=processes)
    assert mesh == [[4.0, 3.0], [6.0, 3.0], [4.0, 7.0], [6.0, 7.0]]
