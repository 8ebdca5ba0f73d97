"""Twins that are more than an order, and levels, against DDP and FSDP."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist

import gpusim
from gpusim import Reduction, Wire, collectives, lax
from gpusim.torch.distributed import launch
from gpusim.twins import SETTINGS, TWINS
from tests.contract.kernel_sets import on_every_set
from tests.oracles.budget import slow
from tests.torch.distributed_programs import PROGRAMS
from tests.torch.gloo_ranks import gloo

GLOO = Reduction(order="gloo-ring")
SIZES = [1, 2, 7, 33, 1000, 4001]
Found = list[dict[str, Any]]


def simulated(name: str, ranks: int, options: dict[str, Any]) -> Found:
    """By simulated ranks, which tests/torch compares with real processes."""
    return launch(lambda rank: PROGRAMS[name](**options), ranks, reduction="gloo-ring")


def assert_means(found: Found, reduction: Reduction, *, equal: bool = True) -> None:
    """Each rank's means are those of the ranks' own gradients by the Reduction, in all bits."""
    differing = 0
    for name in [name for name in found[0] if name.startswith("own")]:
        own = np.stack([each[name].numpy() for each in found])
        mean = on_every_set(lambda own=own: collectives.pmean(own, reduction=reduction).value)
        for each in found:
            expected = each[name.replace("own", "mean")].numpy()
            differing += int((mean.view(np.uint32) != expected.view(np.uint32)).sum())
    assert (differing == 0) == equal, differing


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("ranks", [2, 3, *slow(4, 5, 8)])
def test_compress_hooks_have_the_bits_of_their_twins(kind: str, ranks: int) -> None:
    options = {"seed": ranks, "hook": f"{kind}_compress_hook", "sizes": SIZES}
    found = simulated("hooked_means", ranks, options)
    twin = Reduction.like(f"torch-{kind}-hook")
    assert_means(found, twin)
    exact = kind == "bf16" and ranks in (2, 4, 8)  # quotients by powers of two, no underflow
    assert_means(found, replace(twin, divide="result"), equal=exact)
    assert_means(found, replace(twin, order="linear"), equal=ranks == 2)


@pytest.mark.parametrize("ranks", slow(2, 3, 4, 5, 8))
def test_compress_hooks_of_real_processes_have_the_bits_of_their_twins(
    ranks: int, tmp_path: Path
) -> None:
    """Also where gloo's segments are longer than 1 MiB."""
    options = [
        {"seed": ranks, "hook": f"{kind}_compress_hook", "sizes": [*SIZES, 2_200_003 * ranks // 2]}
        for kind in ("fp16", "bf16")
    ]
    for kind, found in zip(
        ("fp16", "bf16"),
        gloo([("hooked_means", ranks, option) for option in options], tmp_path),
        strict=True,
    ):
        assert_means(found, Reduction.like(f"torch-{kind}-hook"))


def hybrid(shards: int) -> Reduction:
    """FSDP's replicas of shards over gloo."""
    return replace(GLOO, groups_of=shards, across=GLOO)


@pytest.mark.parametrize(
    ("replicas", "shards"), [(2, 2), (3, 2), *slow((2, 4), (4, 2), (3, 4), (5, 2))]
)
def test_replicas_of_shards_are_levels(replicas: int, shards: int) -> None:
    options = {"seed": replicas, "replicas": replicas, "sizes": [1, 33, 1000]}
    found = simulated("hybrid_means", replicas * shards, options)
    assert_means(found, hybrid(shards))
    assert_means(found, GLOO, equal=False)


@pytest.mark.parametrize(("replicas", "shards"), slow((2, 2), (3, 2), (2, 4), (4, 2)))
def test_replicas_of_shards_in_real_processes_are_levels(
    replicas: int, shards: int, tmp_path: Path
) -> None:
    options = {"seed": replicas, "replicas": replicas, "sizes": [1, 33, 1000]}
    (found,) = gloo([("hybrid_means", replicas * shards, options)], tmp_path)
    assert_means(found, hybrid(shards))


def test_shards_of_three_divide_twice() -> None:
    """FSDP's AVG divides in each group; a mean in levels divides once."""
    found = simulated("hybrid_means", 6, {"seed": 1, "replicas": 2, "sizes": [1000]})
    assert_means(found, hybrid(3), equal=False)
    for one in found:
        one["sum 1000"] = one["mean 1000"]
    own = np.stack([each["own 1000"].numpy() for each in found])
    means = [collectives.pmean(own[g : g + 3], reduction=GLOO).value for g in (0, 3)]
    twice = collectives.pmean(np.stack(means), reduction=GLOO).value
    assert twice.tobytes() == found[0]["mean 1000"].numpy().tobytes()


def test_twins_with_wires_are_no_orders() -> None:
    assert not set(SETTINGS) & set(TWINS)
    for name, twin in SETTINGS.items():
        how = Reduction.like(name)
        assert Reduction.twins()[name] is twin and twin.name == name and twin.checked
        assert how.schedule == twin.schedule and how.settings().items() >= dict(twin.fields).items()
        with pytest.raises(ValueError, match=rf"order='{name}': .* Reduction.like\('{name}'\)"):
            Reduction(order=name)
    assert Reduction.like("torch-fp16-hook").wire == Wire("float16", at="members")


NVLS = Reduction.like("nccl-nvls-float32")


def test_nvls_is_the_exact_sum_of_float32() -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 40)).astype(np.float32)
    exact = Reduction(order="exact")
    y = np.random.default_rng(1).standard_normal((5, 5, 40)).astype(np.float32)
    for fields in ({}, {"accumulate": "float64"}, {"wire": Wire("bfloat16", at="ends")}):
        nvls, same = replace(NVLS, **fields), replace(exact, **fields)
        for call, members in (
            (collectives.psum, x),
            (collectives.pmean, x),
            (collectives.psum_scatter, y),
        ):
            found = call(members, reduction=nvls).value
            assert found.tobytes() == call(members, reduction=same).value.tobytes()
    levels = {"groups_of": 2, "across": exact}
    total = collectives.psum(x, reduction=replace(NVLS, **levels)).value
    assert np.array_equal(total, collectives.psum(x, reduction=replace(exact, **levels)).value)
    across = Reduction(groups_of=2, across=NVLS)
    total = collectives.psum(x, reduction=across).value
    assert np.array_equal(total, collectives.psum(x, reduction=replace(across, across=exact)).value)
    assert pickle.loads(pickle.dumps(NVLS)) == NVLS == Reduction.like("nccl-nvls-float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64", "float8_e5m2"])
def test_nvls_is_known_for_float32(dtype: str) -> None:
    x = np.ones((3, 6), getattr(ml_dtypes, dtype, dtype))
    for call in (collectives.psum, collectives.pmean, collectives.psum_scatter):
        members = x if call is not collectives.psum_scatter else x[:, :3]
        with pytest.raises(TypeError, match=f"{dtype} members: .* known for float32"):
            call(members, reduction=NVLS)
    with pytest.raises(TypeError, match=f"{dtype} members: "):
        gpusim.vmap(lambda x: lax.pmean(x, "i", reduction=NVLS), axis_name="i")(x)


def test_nvls_refuses_what_exact_sums_refuse() -> None:
    with pytest.raises(ValueError, match="op='prod', order='exact'"):
        replace(NVLS, op="prod")
    with pytest.raises(ValueError, match="wire at='hops'"):
        replace(NVLS, wire="bfloat16")


@pytest.mark.parametrize("processes", [False, True])
def test_ranks_refuse_what_nvls_does_not_add(processes: bool) -> None:
    def program(rank: int) -> list[float]:
        dist.init_process_group("gloo")
        x = torch.full((2,), 1.0 + rank)
        dist.all_reduce(x)
        with pytest.raises(TypeError, match=r"bfloat16 members: .* known for float32"):
            dist.all_reduce(x.bfloat16())
        return x.tolist()

    found = launch(program, 3, reduction="nccl-nvls-float32", processes=processes)
    assert found == [[6.0, 6.0]] * 3


@pytest.mark.parametrize("dtype", ["float64", "float16", "complex64"])
def test_hooks_are_known_for_float32(dtype: str) -> None:
    x = np.ones((3, 4), dtype)
    with pytest.raises(TypeError, match=f"{dtype} members: "):
        collectives.pmean(x, reduction=Reduction.like("torch-fp16-hook"))


def test_hooks_in_maps_and_ranks() -> None:
    """By hand: float16 has 11 bits, and a third of 2049 is rounded before it is added."""
    x = np.float32([2049, 1, 1])
    like = Reduction.like("torch-fp16-hook")
    third = np.float32(1).astype(np.float16) / np.float16(3)
    expected = np.float32(third + third + np.float16(2048) / np.float16(3))
    mean = gpusim.vmap(lambda v: lax.pmean(v, "i", reduction=like), axis_name="i")(x)
    assert np.asarray(mean).tolist() == [expected] * 3

    def program(rank: int) -> float:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.tensor([float(x[rank])])
        dist.all_reduce(value, dist.ReduceOp.AVG)
        return value.item()

    assert launch(program, 3, reduction="torch-fp16-hook") == [expected] * 3


def test_members_are_divided_where_the_reduction_says_so() -> None:
    with pytest.raises(ValueError, match="divide='first': expected 'result' or 'members'"):
        Reduction(divide="first")
    with pytest.raises(ValueError, match="divide='members', op='max'"):
        Reduction(op="max", divide="members")
    with pytest.raises(ValueError, match="divide='members', op='sum', order='engine'"):
        Reduction(order="engine", divide="members")
    with pytest.raises(ValueError, match="divide='members' in across"):
        Reduction(groups_of=2, across=Reduction(divide="members"))
    x = np.float32([[3e38], [3e38], [1e38]])
    for groups in ({}, {"groups_of": 2, "across": Reduction()}):
        first = Reduction(divide="members", **groups)
        assert np.isfinite(collectives.pmean(x, reduction=first).value).all()
        assert np.isinf(collectives.pmean(x, reduction=replace(first, divide="result")).value).all()
        total = collectives.psum(x / 4, reduction=first).value
        assert total.tolist() == collectives.psum(x / 4).value.tolist()
