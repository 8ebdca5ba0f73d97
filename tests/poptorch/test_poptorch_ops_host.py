"""PopTorch's operations that run on the host: printing, beam search, and points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import ops
from gpusim.poptorch.losses import identity_loss
from gpusim.poptorch.ops.ctc import beams
from gpusim.poptorch.ops.printing import TextSettings, text
from gpusim.poptorch.poptorch_core import Error
from tests.poptorch.poptorch_models import REPLICAS, infer, run

DTYPES = [torch.float32, torch.float16]


class Printing(nn.Module):
    """A weighted input, printed."""

    def __init__(self, dtype: torch.dtype = torch.float32, **how: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, dtype=dtype))
        self.how = how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.ipu_print_tensor(self.w * x, **self.how)
        return y, identity_loss(y * x, "sum")


def pairs(replicas: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1.0, 2.0 * replicas + 1).reshape(replicas, 2).to(dtype)


# Printing.


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_each_replica_prints_the_value_and_the_gradient(
    replicas: int, dtype: torch.dtype, execution: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x = pairs(replicas, dtype)
    _, step = run(Printing(dtype, title="y"), [x], execution, training=True)
    printed = capsys.readouterr()
    lines = [f"({a:.3f}, {b:.3f})" for a, b in x.tolist()]
    assert printed.out == ""
    expected = [f"y: {line}" for line in lines] + [f"y_gradient: {line}" for line in lines]
    assert sorted(printed.err.splitlines()) == sorted(expected)
    if execution == "lockstep":
        assert printed.err.splitlines() == expected
    assert step.outputs[0].equal(x) and step.gradients["w"].equal(x * x)


def test_a_gradient_may_be_left_out(execution: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, step = run(Printing(print_gradient=False), [pairs(1)], execution, training=True)
    assert capsys.readouterr().err == "(1.000, 2.000)\n"
    assert step.gradients["w"].tolist() == [[1, 4]]


def test_inference_prints_no_gradient(execution: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(Printing(), [pairs(1)], execution)
    assert capsys.readouterr().err == "(1.000, 2.000)\n"


def test_what_all_replicas_share_is_printed_by_each(
    execution: str, capsys: pytest.CaptureFixture[str]
) -> None:
    infer(lambda x: x + ops.ipu_print_tensor(torch.ones(1), "one"), [torch.zeros(3, 1)], execution)
    assert capsys.readouterr().err == "one: (1.000)\n" * 3


def test_in_lockstep_what_is_not_used_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def model(x: Tensor) -> Tensor:
        ops.ipu_print_tensor(x, "unused")
        return x + 1

    infer(model, [torch.ones(2)], "lockstep")
    assert capsys.readouterr().err == ""


def test_only_the_branch_that_is_taken_prints(
    execution: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def model(x: Tensor) -> Tensor:
        def then() -> Tensor:
            return ops.ipu_print_tensor(x, "then")

        return ops.cond(x > 1, then, [], lambda: ops.ipu_print_tensor(x, "else"), [])[0]

    infer(model, [torch.arange(4)], execution)
    printed = capsys.readouterr().err.splitlines()
    assert sorted(printed) == ["else: 0", "else: 1", "then: 2", "then: 3"]


def test_compiling_prints_nothing_and_each_micro_batch_once(
    execution: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = poptorch.Options().replicationFactor(2).deviceIterations(3)
    options.showCompilationProgressBar(False)._Popart.set("gpusim.execution", execution)
    model = poptorch.inferenceModel(torch.nn.Sequential(torch.nn.Identity(), Printed()), options)
    x = torch.arange(6.0)
    model.compile(x)
    assert capsys.readouterr().err == ""
    assert model(x).equal(x)
    assert capsys.readouterr().err.split() == [
        part for value in range(6) for part in ("x:", f"({value:.3f})")
    ]
    model.destroy()


class Printed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return ops.ipu_print_tensor(x, "x")


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([1.0, 10.0, -2.5], TextSettings(), "( 1.00, 10.00, -2.50)"),
        ([1.0, 1e6], TextSettings(), "(1.000e+00, 1.000e+06)"),
        ([1.0, 1e6], TextSettings(float_format="fixed"), "(      1, 1000000)"),
        ([1.0, 0.5], TextSettings(float_format="scientific", digits=2), "(1.0e+00, 5.0e-01)"),
        ([1.0, 1e6, 0.25], TextSettings(float_format="none"), "(1, 1e+06, 0.25)"),
        ([0.1, 12.5], TextSettings(digits=0), "(0.1, 12.5)"),
        ([math.inf, math.nan, 1.0], TextSettings(digits=2), "(inf, nan, 1.0)"),
        ([0.0], TextSettings(), "(0.000)"),
        ([1, -20, 300], TextSettings(), "(  1, -20, 300)"),
        ([1, -20, 300], TextSettings(digits=0), "(1, -20, 300)"),
        ([True, False], TextSettings(), "(1, 0)"),
        ([1 + 2j], TextSettings(), "((1+2j))"),
        ([[1, 2], [3, 4]], TextSettings(separator=" "), "(\n (1 2)\n (3 4)\n)"),
        ([[[1, 2]], [[3, 4]]], TextSettings(), "(\n (\n  (1, 2)\n )\n (\n  (3, 4)\n )\n)"),
        ([[], []], TextSettings(), "(\n ()\n ()\n)"),
        (
            [[1, 2, 3, 4], [5, 6, 7, 8]],
            TextSettings(separator=",", max_line_width=8),
            "(\n (1,2,3,\n   4)\n (5,6,7,\n   8)\n)",
        ),
        ([[123, 456]], TextSettings(separator=" ", max_line_width=4), "(\n (123 \n   456)\n)"),
        (
            [[i, i] for i in range(9)],
            TextSettings(separator=",", summarise_threshold=8, edge_items=1),
            "(\n (0,0)\n ...\n (8,8)\n)",
        ),
        (
            [[1] * 9, [2] * 9],
            TextSettings(separator=",", summarise_threshold=8, edge_items=2),
            "(\n (1,1,...,1,1)\n (2,2,...,2,2)\n)",
        ),
        ([1, 2], TextSettings(open_bracket="{ ", close_bracket=" }"), "{ 1, 2 }"),
        (list(range(9)), TextSettings(summarise_threshold=8), "(0, 1, 2, ..., 6, 7, 8)"),
        (list(range(9)), TextSettings(summarise_threshold=8, edge_items=1), "(0, ..., 8)"),
        (list(range(9)), TextSettings(max_line_width=15), "(0, 1, 2, 3, 4, \n   5, 6, 7, 8)"),
        ([], TextSettings(), "()"),
        (7, TextSettings(), "7"),
    ],
)  # fmt: skip
def test_how_tensors_are_written(values: Any, settings: TextSettings, expected: str) -> None:
    assert text(torch.tensor(values), settings) == expected


def test_large_tensors_are_written_whole_if_asked() -> None:
    whole = text(torch.arange(2000), TextSettings(summarise_threshold=0, max_line_width=0))
    assert whole.count(",") == 1999 and "\n" not in whole
    assert "..." in text(torch.arange(2000), TextSettings())


# Beam search.


def decode(probs: Tensor, lengths: Tensor) -> list[Tensor]:
    return ops.ctc_beam_search_decoder(probs, lengths, beam_width=200, top_paths=3)


def chances(probs: np.ndarray[Any, Any], blank: int) -> dict[tuple[int, ...], float]:
    """Of each text, by all ways to write it."""
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(probs.shape[1]), repeat=len(probs)):
        text = tuple(key for key, _ in itertools.groupby(path) if key != blank)
        chance = float(np.prod([step[key] for step, key in zip(probs, path, strict=True)]))
        found[text] = found.get(text, 0.0) + chance
    return found


@pytest.mark.parametrize("blank", [0, 2])
def test_a_wide_beam_finds_all_texts_and_their_chances(blank: int) -> None:
    probs = np.random.default_rng(0).dirichlet(np.ones(3), size=5)
    expected = chances(probs, blank)
    found = dict(beams(np.log(probs), blank, 1000))
    assert found.keys() == expected.keys()
    for key, chance in expected.items():
        assert math.exp(found[key]) == pytest.approx(chance)


def test_a_narrow_beam_keeps_the_likely_ones() -> None:
    probs = np.random.default_rng(0).dirichlet(np.ones(3), size=5)
    assert len(beams(np.log(probs), 0, 2)) == 2
    assert (
        beams(np.log(probs), 0, 30)[0][0] == max(chances(probs, 0).items(), key=lambda x: x[1])[0]
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_each_replica_decodes_its_own(replicas: int, dtype: torch.dtype, execution: str) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(replicas, 4, 2, 3, generator=generator).log_softmax(-1).to(dtype)
    lengths = torch.tensor([[4, 2]]).expand(replicas, 2)
    scores, sizes, texts = infer(decode, [probs, lengths], execution)
    assert scores.dtype == dtype and sizes.dtype == texts.dtype == torch.int32
    assert texts.shape == (replicas, 2, 3, 4)
    for replica, batch in itertools.product(range(replicas), range(2)):
        own = probs[replica, : int(lengths[replica, batch]), batch].exp().double().numpy()
        expected = chances(own, 0)
        for path in range(3):
            size = int(sizes[replica, batch, path])
            text = tuple(texts[replica, batch, path, :size].tolist())
            score = math.exp(float(scores[replica, batch, path]))
            assert score == pytest.approx(expected[text], rel=1e-2)
            assert texts[replica, batch, path, size:].eq(0).all()
        best = scores[replica, batch].tolist()
        assert best == sorted(best, reverse=True)
        assert math.exp(best[0]) == pytest.approx(max(expected.values()), rel=1e-2)


def test_misuse_of_the_decoder() -> None:
    probs, lengths = torch.zeros(4, 2, 3), torch.tensor([4, 4])
    with pytest.raises(
        Error, match=r"probs must be a torch.tensor argument. <class 'list'> is not"
    ):
        ops.ctc_beam_search_decoder([1.0], lengths)
    with pytest.raises(
        Error, match=r"lengths must be a torch\.tensor argument. <class 'int'> is not"
    ):
        ops.ctc_beam_search_decoder(probs, 4)
    with pytest.raises(Error, match="Incorrect shape for first input to CTC beam search"):
        ops.ctc_beam_search_decoder(probs[0], lengths)
    with pytest.raises(Error, match=r"lengths must have the shape \(2,\), got \(1,\)"):
        ops.ctc_beam_search_decoder(probs, lengths[:1])
    with pytest.raises(ValueError, match="blank must be one of 3 classes, got 3"):
        ops.ctc_beam_search_decoder(probs, lengths, blank=3)
    with pytest.raises(ValueError, match="top_paths must be from 1 to beam_width, got 3 and 2"):
        ops.ctc_beam_search_decoder(probs, lengths, beam_width=2, top_paths=3)


# Points.


def farthest(points: Tensor, begin: int, end: int, count: int) -> list[int]:
    """A sample, one point after the other by its definition."""
    chosen = [begin]
    while len(chosen) < count:
        others = [place for place in range(begin, end) if place not in chosen]
        away = {
            place: min(float((points[place] - points[one]).double().norm()) for one in chosen)
            for place in others
        }
        chosen.append(max(away, key=lambda place: away[place]))
    return chosen[:count]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_samples_are_of_the_farthest_points(
    replicas: int, dtype: torch.dtype, execution: str
) -> None:
    src = torch.randn(replicas, 12, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    ptr = [0, 5, 6, 12]
    found = infer(lambda src: ops.fps(src, ptr, 0.4), [src], execution)
    for replica, own in enumerate(src):
        expected = farthest(own, 0, 5, 2) + farthest(own, 5, 6, 1) + farthest(own, 6, 12, 3)
        assert found[replica].tolist() == expected


def test_random_samples_are_each_replicas_own(execution: str) -> None:
    src = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)).expand(8, 20, 3)
    found = infer(lambda src: ops.fps(src, [0, 20], 1.0, random_start=True), [src], execution)
    assert all(sorted(one) == list(range(20)) for one in found.tolist())
    assert len(set(found[:, 0].tolist())) > 1
    others = infer(lambda src: ops.fps(src, [0, 20], 1.0, random_start=True), [src], "lockstep")
    assert found.equal(others)


class Sampled(nn.Module):
    """A loss that picks points of weighted ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        points = self.w * x
        sample = points[ops.fps(points, [0, 6], 0.5)]
        return identity_loss(sample[ops.nearest(points, sample)] * x, "sum")


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
def test_gradients_go_to_the_points_that_were_picked(dtype: torch.dtype, execution: str) -> None:
    x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = Sampled(dtype)
    _, step = run(model, [x], execution, training=True)
    for replica in range(2):
        model.zero_grad()
        model(x[replica]).backward()
        torch.testing.assert_close(step.gradients["w"][replica], model.w.grad)


def nearest_by_hand(x: Tensor, y: Tensor, of_x: list[int], of_y: list[int]) -> list[int]:
    return [
        min(
            (place for place in range(len(y)) if of_y[place] == of_x[number]),
            key=lambda place: float((y[place] - point).double().norm()),
        )
        for number, point in enumerate(x)
    ]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_nearest_points_are_of_the_same_set(
    replicas: int, dtype: torch.dtype, execution: str
) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(replicas, 7, 2, generator=generator).to(dtype)
    y = torch.randn(replicas, 5, 2, generator=generator).to(dtype)
    of_x, of_y = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 2]
    batch_x = torch.tensor([of_x]).expand(replicas, 7)

    def model(x: Tensor, y: Tensor, batch_x: Tensor) -> list[Tensor]:
        return [
            ops.nearest(x, y),
            ops.nearest(x, y, of_x, of_y),
            ops.nearest(x, y, batch_x, torch.tensor(of_y)),
            ops.nearest(x, y, batch_x, of_y),
            ops.nearest(x[:, 0], y[:, 0]),
        ]

    found = infer(model, [x, y, batch_x], execution)
    for replica in range(replicas):
        free, *bound, line = (each[replica].tolist() for each in found)
        a, b = x[replica], y[replica]
        assert free == nearest_by_hand(a, b, [0] * 7, [0] * 5)
        assert bound == [nearest_by_hand(a, b, of_x, of_y)] * 3
        assert line == nearest_by_hand(a[:, :1], b[:, :1], [0] * 7, [0] * 5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.fps([1], [0, 1]), "`fps` must take a torch.tensor input. <class 'list'> is"),
        (lambda x: ops.fps(x, x), "`ptr` must be a list of integers."),
        (lambda x: ops.fps(x, [0]), "`ptr` must containt at least 2 elements."),
        (lambda x: ops.fps(x, [0, 3], 1), "`ratio` must be of float type. <class 'int'> is not"),
        (lambda x: ops.fps(x, [0, 3], 0.5, 1), "`random_start` must be of bool type. <class 'int"),
        (lambda x: ops.nearest(1, x), "`nearest` must take a torch.tensor `x` input. <class 'int'"),
        (lambda x: ops.nearest(x, 1), "`nearest` must take a torch.tensor `y` input. <class 'int'"),
        (lambda x: ops.nearest(x, x, "a", [0]), "`batch_x` is of type <class 'str'> and `batch_y`"),
    ],
)
def test_misuse_of_points(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(Error, match=message):
        call(torch.zeros(3, 2))


def test_points_and_their_sets_have_to_fit() -> None:
    with pytest.raises(ValueError, match=r"must increase from 0 to the number of points"):
        ops.fps(torch.zeros(3, 2), [0, 2])
    with pytest.raises(ValueError, match=r"above 0 and at most 1, got 1\.5"):
        ops.fps(torch.zeros(3, 2), [0, 3], 1.5)
