"""Reductions that are files of revealed orders have the bits of their trees, or are refused."""

from __future__ import annotations

import copy
import pickle
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gpusim
from gpusim import Reduction, as_reduction, collectives, lax
from gpusim.fallback import fold, kernels
from gpusim.fallback.schedules import Case, Schedule, Trees
from gpusim.fallback.trees import SumTree
from gpusim.fallback.wide import ROUNDINGS
from gpusim.revealed import trees_of
from gpusim.tools.reveal import reveal_order
from gpusim.twins import TWINS
from tests.contract.kernel_sets import on_every_set, runs_every_set
from tests.contract.order_files import (
    BITS,
    nodes_of,
    order,
    random_tree,
    random_trees,
    values,
    write,
)
from tests.cuda.host_cuda.device import HostDevice
from tests.oracles.budget import budget

DEVICE = HostDevice()
GLOO = trees_of(TWINS["gloo-ring"].schedule, 4, 64, 4)


@pytest.fixture
def gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The file of gloo's ring, 64 elements on 4 ranks, in the working directory."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "order.json", order(GLOO, 4))
    return "order.json"


# The bits


@runs_every_set
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("name", TWINS)
def test_the_file_of_a_twin_has_its_bits(name: str, ranks: int, tmp_path: Path) -> None:
    twin = TWINS[name]
    for dtype in set(twin.dtypes) & set(BITS):
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        own = twin.schedule.hops == "own" or kind.itemsize > 2
        for elements in (1, 5, 64, 1003):
            try:
                trees = trees_of(twin.schedule, ranks, elements, kind.itemsize)
            except ValueError:
                continue  # the engine's order is not known for so many
            bits = BITS[dtype] if own or dtype == "float16" else 24
            contents = order(trees, ranks, dtype, bits, minus_zero=not twin.schedule.from_zero)
            again = Reduction.like(write(tmp_path / "order.json", contents))
            x = values(ranks, elements, kind)
            x[:, 0] = -0.0
            for rounding in ("nearest", "stochastic"):
                how: dict[str, Any] = {"rounding": rounding, "seed": 5, "call": 3}
                expected = fold(x, order=twin.schedule, **how)
                found = on_every_set(partial(fold, x, order=again.schedule, **how))
                assert found.tobytes() == expected.tobytes(), (dtype, elements, rounding)
                on_gpu = DEVICE.fold(x, order=again.schedule, **how)
                assert np.asarray(on_gpu).tobytes() == expected.tobytes()


@settings(
    max_examples=budget(300),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.integers(0, 2**30), st.integers(2, 12), st.integers(1, 60), st.sampled_from([*BITS]))
def test_random_trees_have_the_bits_of_their_additions(
    tmp_path: Path, seed: int, ranks: int, elements: int, dtype: str
) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, ranks, elements)
    chosen = Reduction.like(write(tmp_path / f"{seed}.json", order(trees, ranks, dtype)))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = values(ranks, elements, kind, seed)
    found = collectives.psum(x, reduction=chosen).value
    for begin, end, tree in trees.ranges:
        # One addition of such numbers, which NumPy rounds once: float32's sums of halves are exact
        # enough that a second rounding gives the same bits.
        total = tree.folded(
            lambda m, a=begin, b=end: x[m, a:b], lambda terms, _: terms[0] + terms[1]
        )
        assert found[begin:end].tobytes() == np.asarray(total).tobytes()
    (tmp_path / f"{seed}.json").unlink()


def test_every_executor_takes_a_file(gloo: str) -> None:
    x, ring = values(4, 64, np.float32), Reduction.like("gloo-ring")
    chosen = Reduction.like(gloo)
    for call in (
        lambda r: collectives.psum(x, reduction=r).value,
        lambda r: collectives.pmean(x, reduction=r).value,
        lambda r: collectives.psum_scatter(x, reduction=r, tiled=True).value,
        lambda r: (
            collectives.psum(
                np.tile(x, (2, 1)), groups=[[*range(4)], [*range(4, 8)]], reduction=r
            ).value
        ),
        lambda r: gpusim.vmap(lambda v: lax.psum(v, "i", reduction=r), axis_name="i")(x),
        lambda r: gpusim.pmap(lambda v: lax.psum(v, "i", reduction=r), axis_name="i")(x),
    ):
        assert np.asarray(call(chosen)).tobytes() == np.asarray(call(ring)).tobytes()
    with gpusim.reduction(gloo):
        inside = collectives.psum(x).value
    assert inside.tobytes() == collectives.psum(x, reduction=ring).value.tobytes()


def test_levels_take_a_file_in_each_level(gloo: str) -> None:
    x = values(8, 64, np.float32)
    for text in ("{} groups_of=4 across tree", "linear groups_of=2 across {}"):
        one = collectives.psum(x, reduction=text.format(gloo)).value
        other = collectives.psum(x, reduction=text.format("gloo-ring")).value
        if text.startswith("{}"):  # a ring's blocks are values of their own across, here it is one
            assert one.tobytes() == other.tobytes()
        assert one.shape == other.shape


def test_what_has_the_same_bits_in_every_order_takes_any_size(gloo: str) -> None:
    chosen = as_reduction(gloo)
    numbers = np.arange(12).reshape(4, 3)
    assert collectives.psum(numbers, reduction=chosen).value.tolist() == [18, 22, 26]
    largest = as_reduction(f"{gloo} op=max")
    x = values(4, 7, np.float64)
    assert collectives.all_reduce(x, reduction=largest).value.tobytes() == x.max(0).tobytes()
    lone = x[:1].astype(np.float32)
    assert collectives.psum(lone, reduction=chosen).value.tobytes() == lone[0].tobytes()
    assert collectives.psum(np.ones((4, 0), np.float32), reduction=chosen).value.shape == (0,)


def test_accumulators_are_the_files(tmp_path: Path) -> None:
    x = np.ones((300, 3), ml_dtypes.bfloat16)
    chain = trees_of("linear", 300, 3, 2)
    for bits, total in ((8, 256), (11, 300), (24, 300), (53, 300)):
        path = write(tmp_path / "order.json", order(chain, 300, "bfloat16", bits))
        chosen = Reduction.like(path)
        assert collectives.psum(x, reduction=chosen).value.tolist() == [total] * 3
    small = np.ones((40, 3), ml_dtypes.float8_e4m3fn)
    contents = order(trees_of("linear", 40, 3, 1), 40, "float8_e4m3fn", 4)
    chosen = Reduction.like(write(path, contents))
    assert collectives.psum(small, reduction=chosen).value.tolist() == [16] * 3
    contents = order(chain, 300, "bfloat16", 7)
    with pytest.raises(ValueError, match=r"an accumulator of 7 bits: expected 8, 11, 24 or 53"):
        collectives.psum(x, reduction=Reduction.like(write(path, contents)))
    contents = order(chain, 300, "bfloat16")
    contents["trees"][0]["accumulator"] = {"bits": None}  # no rounding was seen
    chosen = Reduction.like(write(path, contents))
    assert collectives.psum(x, reduction=chosen).value.tolist() == [300] * 3


def test_one_adder_of_all_ranks_is_the_exact_order(tmp_path: Path) -> None:
    trees = Trees((0, 9), (0,), (SumTree.of([*range(5)]),))
    chosen = Reduction.like(write(tmp_path / "order.json", order(trees, 5)))
    x = values(5, 9, np.float32)
    expected = collectives.psum(x, reduction="exact").value
    assert collectives.psum(x, reduction=chosen).value.tobytes() == expected.tobytes()


@settings(max_examples=budget(400), deadline=None)
@given(
    st.integers(0, 2**30),
    st.integers(2, 16),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([*ROUNDINGS]),
    st.booleans(),
)
def test_replays_are_what_reveals_own_arithmetic_gives(
    seed: int, ranks: int, dtype: str, rounding: str, own: bool
) -> None:
    """Of its script, which shares no code with the kernels: wide adders, and all roundings."""
    random = np.random.default_rng(seed)
    nested = random_tree(random, ranks, int(random.integers(2, 9)))
    adders = []
    for path, node in nodes_of(nested):
        if len(node) > 2 or random.random() < 0.2:
            aligned = {"kind": "aligned", "bits": int(random.integers(4, 27))}
            kind = {"kind": "exact"} if random.random() < 0.5 else aligned
            adders.append([[*path], {**kind, "rounding": str(random.choice([*ROUNDINGS]))}])
    bits = BITS[dtype] if own else 24
    last = rounding if bits == BITS[dtype] else "nearest-even"
    tree = {
        "tree": nested,
        "adders": adders or "rounded",
        "accumulator": {"bits": bits, "rounding": rounding},
        "result": {"bits": BITS[dtype], "rounding": last},
    }
    contents = order(Trees((0, 9), (0,), (SumTree.of(nested),)), ranks, dtype)
    x = values(ranks, 9, np.dtype(getattr(ml_dtypes, dtype, dtype)), seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "order.json", contents | {"trees": [tree]})
        found = collectives.psum(x, reduction=Reduction.like(path)).value
    expected = reveal_order.simulate(tree, x.astype(np.float64))
    assert found.astype(np.float64).tolist() == expected.tolist()


# Texts


def test_the_text_is_the_files_name(gloo: str) -> None:
    chosen = Reduction.like(gloo)
    assert str(chosen) == gloo and as_reduction(str(chosen)) == chosen
    assert as_reduction(Path(gloo)) == chosen == Reduction(order=gloo)
    text = f"{gloo} accumulate=float64 rounding=stochastic seed=3"
    assert str(as_reduction(text)) == text
    assert as_reduction({"order": gloo, "seed": 1}).seed == 1
    levels = f"{gloo} groups_of=4 across {gloo}"
    assert str(as_reduction(levels)) == levels
    assert pickle.loads(pickle.dumps(chosen)) == chosen and copy.deepcopy(chosen) == chosen
    assert len(repr(chosen)) < 120 and hash(chosen) == hash(as_reduction(gloo))


def test_a_file_that_changes_is_read_again(gloo: str) -> None:
    before = as_reduction(gloo)
    write(Path(gloo), order(trees_of("linear", 4, 65, 4), 4))
    after = as_reduction(gloo)
    assert before != after
    assert collectives.psum(values(4, 65, np.float32), reduction=after).value.shape == (65,)


def test_what_a_file_lacks_is_refused_with_what_it_has(gloo: str) -> None:
    chosen = as_reduction(gloo)
    known = r"order.json knows sums of 4 ranks: float32 of 64 elements; gpusim reveal --write"
    with pytest.raises(ValueError, match=rf"^63 elements: {known}"):
        collectives.psum(np.ones((4, 63), np.float32), reduction=chosen)
    with pytest.raises(ValueError, match=r"^5 members: order.json was revealed with 4 ranks"):
        collectives.psum(np.ones((5, 64), np.float32), reduction=chosen)
    with pytest.raises(TypeError, match=rf"^float16 members: {known}"):
        collectives.psum(np.ones((4, 64), np.float16), reduction=chosen)
    with pytest.raises(ValueError, match=r"op='prod': order.json has the order of sums"):
        collectives.all_reduce(np.ones((4, 64), np.float32), reduction=f"{gloo} op=prod")
    for text, message in (
        (f"{gloo} wire=bfloat16", "expected no wire, as trees say what is added"),
        (f"{gloo} divide=members", "expected 'result', as the trees are those of sums"),
        (f"{gloo} chunk=4", "order.json lacks it; nccl-ring has it"),
        ("none.json", "No such file"),
        (".", "or a file .order.json."),
    ):
        with pytest.raises(ValueError, match=message):
            as_reduction(text)
    for name in ("a file.json", "a=b.json"):
        with pytest.raises(ValueError, match="expected a file's name without blanks and '='"):
            Reduction.like(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adders": [[[], "unknown"]]}, "an adder of 3 terms adds in a way that was not found"),
        ({"adders": "unknown"}, "an adder of 3 terms adds"),
        ({"adders": "rounded"}, "an adder of 3 terms adds"),
        (
            {"adders": [[[], {"kind": "aligned", "bits": 24, "rounding": "unknown"}]]},
            "an adder of 3",
        ),
        ({"accumulator": {"bits": 53, "rounding": "up"}}, "53 bits, up: expected 8, 11 or 24"),
        ({"accumulator": {"bits": 24, "rounding": "unknown"}}, "rounding 'unknown'"),
        ({"accumulator": {"bits": 24, "rounding": "stochastic"}}, "rounding 'stochastic'"),
        ({"accumulators": [[[], {"bits": 8, "rounding": "nearest-even"}]]}, "and some 8 bits"),
        ({"accumulators": [[[], {"bits": 24, "rounding": "up"}]]}, "nearest-even, and some up"),
        ({"result": {"bits": 11, "rounding": "nearest-even"}}, "result: 11 bits: expected 24"),
    ],
)
def test_what_cannot_be_replayed_says_why(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    contents = order(Trees((0, 4), (0,), (SumTree.of([0, 1, 2]),)), 3)
    contents["trees"][0] |= changes
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    with pytest.raises(ValueError, match=rf"4 elements of float32: trees\[0\]: .*{message}"):
        collectives.psum(np.ones((3, 4), np.float32), reduction=chosen)


def test_calls_that_cannot_be_replayed_say_why(tmp_path: Path) -> None:
    contents = order(GLOO, 4)
    contents["calls"][0] |= {"ranges": [[0, 60, 0], [60, 64, -1, "results overflow"]]}
    contents["calls"].append({"elements": 5, "ranges": [[0, 5, 1]], "same": False})
    contents["calls"].append({"elements": 5, "ranges": [[0, 5, 2]]})
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    message = "4 elements, from 60 on, have results that no tree explains: results overflow"
    with pytest.raises(ValueError, match=message):
        collectives.psum(np.ones((4, 64), np.float32), reduction=chosen)
    with pytest.raises(ValueError, match="the trees change from run to run"):
        collectives.psum(np.ones((4, 5), np.float32), reduction=chosen)
    del contents["calls"][1]
    contents["trees"][0]["accumulator"]["bits"] = 53
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    with pytest.raises(ValueError, match=r"trees with accumulators of 24 bits.*, 53 bits"):
        collectives.psum(np.ones((4, 5), np.float32), reduction=chosen)
    contents["trees"][0] |= {"accumulator": contents["trees"][1]["accumulator"]}
    contents["trees"][0] |= {"minus_zero": False}
    chosen = Reduction.like(write(tmp_path / "order.json", contents))
    with pytest.raises(ValueError, match="sums of negative zeros are -0 by some trees and"):
        collectives.psum(np.ones((4, 5), np.float32), reduction=chosen)


@runs_every_set
def test_trees_by_ranges_are_orders_of_the_kernels(gloo: str) -> None:
    del gloo
    random = np.random.default_rng(4)
    order_of = Schedule((Case(random_trees(random, 6, 90)),))
    x = values(6, 90, np.float32)
    with kernels.chosen("numpy"):
        expected = fold(x, order=order_of)
    assert np.asarray(DEVICE.fold(x, order=order_of)).tobytes() == expected.tobytes()
