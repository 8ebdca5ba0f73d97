"""The traces that `gpusim equal` compares, and how it matches their names; without programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpusim.tools.equal.matching import Matching, match, prefixes, stages_of
from gpusim.tools.equal.traces import Claim, Slice, Trace, TraceWriter, read

Array = NDArray[Any]

# ---------------------------------------------------------------- traces


def write_trace(
    folder: Path,
    ranks: Sequence[Sequence[tuple[Array, dict[str, Any]]]],
    limit: int = 1 << 20,
    ends: Sequence[dict[str, Any]] | None = None,
) -> Trace:
    """A trace with these events of each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, events in enumerate(ranks):
        writer = TraceWriter(folder, rank, len(ranks), limit)
        for order, (array, about) in enumerate(events, 1):
            writer.write(array, **{**ABOUT, "order": order, **about})
        writer.end(**{"steps": 1, **(ends[rank] if ends else {})})
    return read(folder)


ABOUT: dict[str, Any] = {
    "kind": "output",
    "root": "Model",
    "name": "a",
    "leaf": "",
    "step": 0,
    "count": 0,
}
VALUES: dict[str, Array] = {
    "float64": np.random.default_rng(0).standard_normal((3, 5)),
    "float32": np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32),
    "int64": np.array([[1, -(2**62)], [3, 4]]),
    "int32": np.array([1, -2], np.int32),
    "bool": np.array([True, False, True]),
    "uint8": np.array([0, 255], np.uint8),
    "0-d": np.array(2.5),
    "0-d bool": np.array(True),
    "empty": np.zeros((0, 3)),
    "transposed": np.random.default_rng(0).standard_normal((3, 5)).T,
    "every second": np.arange(10.0)[::2],
    "backwards": np.arange(4.0)[::-1],
    "nan": np.array([np.nan, np.inf, -np.inf, -0.0]),
}


@pytest.mark.parametrize("names", [[name] for name in VALUES] + [list(VALUES), ["bool", *VALUES]])
def test_a_trace_is_read_as_it_was_written(names: list[str], tmp_path: Path) -> None:
    """Floats become float64 and others int64; also where odd bytes come before."""
    trace = write_trace(tmp_path, [[(VALUES[name], {"name": name}) for name in names]])
    events = trace.by_rank[0].events
    assert [event.name for event in events] == names
    for event in events:
        value = VALUES[event.name]
        assert event.array.dtype == (np.float64 if value.dtype.kind == "f" else np.int64)
        assert event.array.shape == event.shape == value.shape
        np.testing.assert_array_equal(event.array, value)
        assert event.dtype == value.dtype.name


def test_what_is_known_of_an_event(tmp_path: Path) -> None:
    about = {
        "claim": [["S0", "R"], [[0, 1]], [4, 2]],
        "slice": [3, [4, 2]],
        "bits": "00ff",
        "added": 7,
        "evaluated": True,
        "leaf": ".x",
        "step": 2,
        "count": 3,
        "order": 9,
    }
    (event,) = write_trace(tmp_path, [[(np.ones(2), about)]]).by_rank[0].events
    assert event.claim == Claim(("S0", "R"), [[0, 1]], (4, 2))
    assert event.slice == Slice(3, (4, 2))
    known = (event.kind, event.root, event.name, event.leaf, event.step, event.count, event.order)
    assert known == ("output", "Model", "a", ".x", 2, 3, 9)
    assert (event.bits, event.added, event.evaluated) == ("00ff", 7, True)
    (plain,) = write_trace(tmp_path, [[(np.ones(2), {})]]).by_rank[0].events
    assert (plain.claim, plain.slice, plain.bits, plain.added, plain.evaluated) == (
        None,
        None,
        "",
        0,
        False,
    )


def test_the_same_elements_are_written_once(tmp_path: Path) -> None:
    value = np.arange(100.0)
    trace = write_trace(tmp_path, [[(value, {}), (value.copy(), {"count": 1}), (-value, {})]])
    assert (tmp_path / "rank-0.bin").stat().st_size == 1600
    first, again, other = trace.by_rank[0].events
    np.testing.assert_array_equal(first.array, again.array)
    np.testing.assert_array_equal(other.array, -value)


def test_what_is_beyond_the_limit_is_left_out(tmp_path: Path) -> None:
    events = [(np.arange(4.0) + n, {"name": str(n)}) for n in range(4)]
    trace = write_trace(tmp_path, [[*events, (np.array(1.5), {"name": "small"})]], limit=72)
    assert [event.name for event in trace.by_rank[0].events] == ["0", "1", "small"]
    assert trace.by_rank[0].end["left_out"] == 2
    assert list(trace.ends("left_out")) == [2]


def test_all_ranks_have_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the trace of each rank"):
        read(tmp_path)
    trace = write_trace(tmp_path, [[(np.ones(1), {})]] * 11)
    assert [rank.rank for rank in trace.by_rank] == list(range(11))
    assert trace.ranks == 11
    (tmp_path / "rank-3.jsonl").unlink()
    with pytest.raises(ValueError, match="expected the trace of each rank"):
        read(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    write_trace(tmp_path, [[]])
    path = tmp_path / "rank-0.jsonl"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="format"):
        read(tmp_path)


def test_a_rank_that_did_not_end_well(tmp_path: Path) -> None:
    """Its events are read, and its end is not known."""
    write_trace(tmp_path, [[(np.ones(2), {})], [(np.ones(2), {})]])
    path = tmp_path / "rank-1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    trace = read(tmp_path)
    assert list(trace.ends("steps")) == [1, None]
    assert len(trace.by_rank[1].events) == 1


@pytest.mark.parametrize("kept", [0, 10])
def test_a_rank_that_was_killed(kept: int, tmp_path: Path) -> None:
    """What it had not written is missing: nothing at all, or a half of a line."""
    write_trace(tmp_path, [[(np.ones(2), {})], [(np.ones(2), {})]])
    path = tmp_path / "rank-1.jsonl"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError):
        read(tmp_path)


# ---------------------------------------------------------------- names

Weights = dict[str, Array]


def weights(seed: int = 0, **shapes: tuple[int, ...]) -> Weights:
    """Random weights by their names, in which two underscores stand for a dot."""
    numbers = np.random.default_rng(seed)
    return {name.replace("__", "."): numbers.standard_normal(own) for name, own in shapes.items()}


def trace_of(
    folder: Path,
    ranks: Sequence[Weights | dict[str, Weights]],
    ends: Sequence[dict[str, Any]] | None = None,
) -> Trace:
    """A trace with the weights of each rank, by the tags of models if there are several."""
    events = []
    for own in ranks:
        models = own if all(isinstance(each, dict) for each in own.values()) else {"Model": own}
        events.append(
            [
                (array, {"kind": "weight", "root": tag, "name": name})
                for tag, model in models.items()
                for name, array in model.items()
            ]
        )
    return write_trace(folder, events, ends=ends)


def keys(found: Matching, trace: Trace) -> list[list[tuple[str, str]]]:
    """Of each rank: what its events' tags and names are in the reference."""
    return [[found.key(event) for event in rank.events] for rank in trace.by_rank]


LAYERS = weights(layers__0__w=(3, 4), layers__1__w=(3, 4), layers__2__w=(3, 4), head__w=(2, 3))


def layer(numbers: Sequence[int], head: bool = False) -> Weights:
    """A stage with these layers of the model, numbered from 0."""
    own = {f"layers.{n}.w": LAYERS[f"layers.{number}.w"] for n, number in enumerate(numbers)}
    return {**own, "head.w": LAYERS["head.w"]} if head else own


def test_prefixes_of_numbers() -> None:
    assert prefixes(["a.0.b.1.w", "a.0.b.2.w", "a.3.w", "w", "b.w2"]) == {
        "a": {0, 3},
        "a.0.b": {1, 2},
    }
    assert prefixes(["0.w", "1.w"]) == {"": {0, 1}}


def test_the_same_names_stay(tmp_path: Path) -> None:
    reference = trace_of(tmp_path / "one", [LAYERS])
    candidate = trace_of(tmp_path / "two", [LAYERS, LAYERS])
    found = match(reference, candidate)
    assert found == Matching()
    assert keys(found, candidate) == [[("Model", name) for name in LAYERS]] * 2


def test_names_of_a_pipelines_stages_stay(tmp_path: Path) -> None:
    """Ranks that have all numbers together number as the model does."""
    reference = trace_of(tmp_path / "one", [LAYERS])
    stages = [{"layers.0.w": LAYERS["layers.0.w"]}, dict(list(LAYERS.items())[1:])]
    candidate = trace_of(tmp_path / "two", stages)
    found = match(reference, candidate)
    assert not found.numbers and not found.said


@pytest.mark.parametrize("order", [[(0,), (1, 2)], [(1, 2), (0,)], [(2, 0), (1,)]])
def test_layers_are_numbered_by_their_elements(
    order: list[tuple[int, ...]], tmp_path: Path
) -> None:
    reference = trace_of(tmp_path / "one", [LAYERS])
    candidate = trace_of(tmp_path / "two", [layer(own) for own in order])
    found = match(reference, candidate)
    assert keys(found, candidate) == [
        [("Model", f"layers.{number}.w") for number in own] for own in order
    ]
    assert len(found.said) == 1 and found.said[0].startswith("layers numbers from 0 on each rank:")


def test_layers_are_numbered_by_shards(tmp_path: Path) -> None:
    """Tensor parallelism within a stage: a part of the weight is enough."""
    reference = trace_of(tmp_path / "one", [LAYERS])
    stages = [layer((0,)), layer((0,)), layer((1, 2), True), layer((1, 2), True)]
    shards = [
        {name: array[:, 2 * (n % 2) :][:, :2] for name, array in stage.items() if "layers" in name}
        for n, stage in enumerate(stages)
    ]
    candidate = trace_of(tmp_path / "four", shards)
    found = match(reference, candidate)
    assert keys(found, candidate) == [
        [("Model", f"layers.{number}.w") for number in own] for own in ((0,), (0,), (1, 2), (1, 2))
    ]


def test_experts_in_layers_are_numbered(tmp_path: Path) -> None:
    """Numbers behind numbers: each rank has other experts of both layers."""
    shapes = {f"layers__{n}__experts__{k}__w": (2, 3) for n in range(2) for k in range(4)}
    whole = weights(**shapes)
    reference = trace_of(tmp_path / "one", [whole])
    held = [
        {
            f"layers.{n}.experts.{k}.w": whole[f"layers.{n}.experts.{k + 2 * rank}.w"]
            for n in range(2)
            for k in range(2)
        }
        for rank in range(2)
    ]
    candidate = trace_of(tmp_path / "two", held)
    found = match(reference, candidate)
    assert keys(found, candidate) == [
        [("Model", f"layers.{n}.experts.{k + 2 * rank}.w") for n in range(2) for k in range(2)]
        for rank in range(2)
    ]


def messages(*own: tuple[str, int]) -> dict[str, Any]:
    return {"messages": [list(each) for each in own]}


def test_layers_are_numbered_by_the_order_of_stages(tmp_path: Path) -> None:
    """Weights that are drawn otherwise: activations pass from rank 2 to 0 to 1."""
    reference = trace_of(tmp_path / "one", [LAYERS])
    other = [{"layers.0.w": np.full((3, 4), 7.0 + n)} for n in range(3)]
    ends = [
        messages(("recv", 2), ("send", 1)),
        messages(("recv", 0), ("send", 0)),
        messages(("send", 0), ("recv", 0)),
    ]
    candidate = trace_of(tmp_path / "three", other, ends)
    assert stages_of(candidate) == [[2, 0, 1]]
    found = match(reference, candidate)
    assert keys(found, candidate) == [
        [("Model", "layers.1.w")],
        [("Model", "layers.2.w")],
        [("Model", "layers.0.w")],
    ]


def test_two_pipelines_beside_each_other(tmp_path: Path) -> None:
    ends = [
        messages(("send", 2), ("recv", 2)),
        messages(("send", 3), ("recv", 3)),
        messages(("recv", 0), ("send", 0)),
        messages(("recv", 1), ("send", 1)),
    ]
    candidate = trace_of(tmp_path, [{"layers.0.w": np.full((3, 4), 7.0)}] * 4, ends)
    assert stages_of(candidate) == [[0, 2], [1, 3]]


def test_layers_that_are_nowhere_keep_their_numbers(tmp_path: Path) -> None:
    """Neither elements nor messages say which they are."""
    reference = trace_of(tmp_path / "one", [LAYERS])
    other = [{"layers.0.w": np.full((3, 4), 7.0 + n)} for n in range(2)]
    candidate = trace_of(tmp_path / "two", other)
    assert match(reference, candidate) == Matching()


def test_outermost_modules_of_other_names(tmp_path: Path) -> None:
    """A stage is a part of the reference's model; a second chunk is of the first one's class."""
    reference = trace_of(tmp_path / "one", [LAYERS])
    candidate = trace_of(
        tmp_path / "two",
        [{"Stage": layer((0,)), "Stage#2": layer((1,))}, {"Model": LAYERS, "Model#2": LAYERS}],
    )
    found = match(reference, candidate)
    assert found.roots == {(0, "Stage"): "Model", (0, "Stage#2"): "Model", (1, "Model#2"): "Model"}
