"""Meshes of programs: shardings in terms of axes, and groups of devices."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpusim.jax.partitioned.meshes import (
    Mesh,
    Numbering,
    SubAxis,
    groups_along,
    merged,
    mesh_and_parts,
    stated_groups,
)
from gpusim.jax.private import HloSharding

NAMES = ("data", "model", "pipe")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes of up to 24 devices, which may be numbered in any order."""
    shape = draw(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(
            lambda s: 2 <= math.prod(s) <= 24
        )
    )
    devices = np.arange(math.prod(shape))
    if draw(st.booleans()):
        devices = np.array(draw(st.permutations(devices.tolist())))
    return Mesh(NAMES[: len(shape)], devices.reshape(shape))


@st.composite
def placements(draw: st.DrawFn) -> tuple[Mesh, list[list[SubAxis]]]:
    """A mesh, and parts of its axes shared out over the dimensions of an array; some are left."""
    mesh = draw(meshes())
    parts = draw(st.permutations(mesh.digits()))
    parts = parts[: draw(st.integers(0, len(parts)))]
    cuts = sorted(draw(st.lists(st.integers(0, len(parts)), max_size=2)))
    return mesh, [parts[low:high] for low, high in pairwise([0, *cuts, len(parts)])]


def sharding(mesh: Mesh, dimensions: list[list[SubAxis]], rest: str) -> HloSharding:
    """XLA's sharding with these parts; `rest` is the kind of those that are left."""
    digits = mesh.digits()
    split = mesh.devices.reshape([digit.size for digit in digits])
    order = [digits.index(part) for parts in dimensions for part in parts]
    left = [k for k in range(len(digits)) if k not in order]
    tiles = [math.prod(part.size for part in parts) for parts in dimensions]
    last = math.prod(digits[k].size for k in left)
    ids = ",".join(map(str, split.transpose(order + left).reshape(-1)))
    shape = ",".join(map(str, [*tiles, last]))
    return HloSharding.from_string(f"{{devices=[{shape}]{ids} last_tile_dims={{{rest}}}}}")


@given(placements(), st.sampled_from(["replicated", "unreduced"]))
def test_shardings_are_told_in_parts_of_axes(
    given: tuple[Mesh, list[list[SubAxis]]], rest: str
) -> None:
    mesh, dimensions = given
    found = Numbering(mesh).place(sharding(mesh, dimensions, rest), len(dimensions))
    assert found is not None
    assert found.dimensions == [merged(parts) for parts in dimensions]
    left = [part for part in mesh.digits() if all(part not in parts for parts in dimensions)]
    assert found.unreduced == (merged(left) if rest == "unreduced" else [])


@given(placements())
def test_groups_along_axes_have_their_names(given: tuple[Mesh, list[list[SubAxis]]]) -> None:
    mesh, dimensions = given
    parts = [part for some in dimensions for part in some]
    groups = groups_along(mesh, parts)
    assert sorted(member for group in groups for member in group) == sorted(mesh.devices.flat)
    names = Numbering(mesh).axes_of(groups)
    assert names is not None
    assert {*names} == {part.axis for part in parts}
    for group in groups:  # the last part is the fastest
        places = [tuple(np.argwhere(mesh.devices == member)[0]) for member in group]
        assert len({*places}) == len(group)


def test_a_sharding_over_another_mesh_is_refused() -> None:
    numbering = Numbering(Mesh(("a", "b"), np.arange(6).reshape(2, 3)))
    of_three_and_two = HloSharding.from_string("{devices=[3,2]<=[6]}")
    assert numbering.place(of_three_and_two, 2) is None
    assert numbering.place(HloSharding.from_string("{devices=[6]<=[6]}"), 2) is None
    assert numbering.place(HloSharding.from_string("{manual}"), 2) is None
    assert numbering.place(HloSharding.from_string("{devices=[4]<=[4]}"), 1) is None


def test_groups_of_no_axes_have_no_names() -> None:
    numbering = Numbering(Mesh(("a", "b"), np.arange(4).reshape(2, 2)))
    assert numbering.axes_of([[0, 3], [1, 2]]) is None
    assert numbering.axes_of([[0, 1, 2], [3]]) is None
    assert numbering.axes_of([[0, 1, 2, 3]]) == ("a", "b")


def test_groups_are_read_from_xlas_text() -> None:
    text = """
      %a = f32[4] all-reduce(%x), channel_id=1, replica_groups=mesh['i'=4,'j'=2], \
device_ids=([2,4]T(1,0)) {'i'}, use_global_device_ids=true, to_apply=%add
      %b = f32[4] all-gather(%x), channel_id=2, replica_groups=mesh['i'=2,'j'=4] {'j':(2)2,'i'}
      %c = f32[4] all-reduce(%x), channel_id=3, replica_groups=mesh['i'=2], device_ids=(1,0) {'i'}
      %d = f32[4] all-reduce(%x), channel_id=4, replica_groups=[2,4]<=[8]
    """
    found = {stated.channel: groups for stated, groups in stated_groups(text).items()}
    assert found == {
        1: [[0, 1, 2, 3], [4, 5, 6, 7]],
        2: [[0, 4, 1, 5], [2, 6, 3, 7]],
        3: [[1, 0]],
    }
    one_channel = [
        "channel_id=1, replica_groups=mesh['i'=2,'j'=2] {'i'}",
        "channel_id=1, replica_groups=mesh['i'=2,'j'=2] {'j'}",
    ]
    assert [*stated_groups(" ".join(one_channel)).values()] == [
        [[0, 2], [1, 3]],
        [[0, 1], [2, 3]],
    ]
    alike = "channel_id=1, replica_groups=mesh['i'=2,'j'=2], device_ids=([2,2]T(1,0)) {'i'}"
    assert [*stated_groups(f"{one_channel[0]} {alike}").values()] == [None]
    mesh, parts = mesh_and_parts("'i'=4,'j'=2", "([2,4]T(1,0))"[1:-1], "'i'")
    assert mesh.devices.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert parts == [SubAxis("i", 1, 4)]
