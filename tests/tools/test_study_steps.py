"""Steps of the training study, bit for bit against float64 and against fractions.

The replay shares nothing with the study but the network's gradients: a float32 operation is that of
float64 rounded once more, which gives the same bits for + - * / and roots (53 >= 2 * 24 + 2), and
rounding to a narrow format is written out here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim.fallback import round_to
from gpusim.formats import kernel_format
from gpusim.reduction import Reduction
from gpusim.study import train
from gpusim.tools import digits
from gpusim.tools.study.optimizers import OPTIMIZERS, Clipping, Optimizer
from gpusim.tools.study.training import Training, parse, parse_states

Arrays = dict[str, np.ndarray]
SHAPES = {"a": (7,), "b": (3, 5), "c": (1,), "d": (13, 1)}
NARROW = {"float16": (11, -14, 65504.0), "bfloat16": (8, -126, 3.3895313892515355e38),
          "float8_e5m2": (3, -14, 57344.0), "e5m6": (7, -14, 65024.0)}  # fmt: skip
"""Bits of the significand, the least exponent of a normal number, the largest number."""


def to_float32(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def to_narrow(x: np.ndarray, name: str) -> np.ndarray:
    """Rounded to nearest, ties to even; what is too large becomes infinity."""
    if name == "float32":
        return to_float32(x)
    bits, least, most = NARROW[name]
    x = np.asarray(x, np.float64)
    _, exponent = np.frexp(x)
    unit = np.exp2(np.maximum(exponent - 1, least) - (bits - 1.0))
    near = np.rint(x / unit) * unit
    return np.where(np.abs(near) > most, np.copysign(np.inf, near), near)


def to_fraction(x: Fraction, bits: int, least: int) -> Fraction:
    """The same of a fraction, in whole numbers."""
    if x == 0:
        return x
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    while Fraction(2) ** exponent > abs(x):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(x):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, least) - (bits - 1))
    return round(x / unit) * unit  # Python rounds ties to even


def drawn(seed: int, scale: float = 1.0) -> Arrays:
    draw = np.random.default_rng(seed)
    return {
        name: (draw.standard_normal(shape) * scale * 2.0 ** draw.integers(-9, 3, shape)).astype(
            "f4"
        )
        for name, shape in SHAPES.items()
    }


@dataclass
class Replay:
    """An optimizer in float64, with float32's roundings written out."""

    kind: str
    rate: float
    formats: dict[str, str]

    def __post_init__(self) -> None:
        self.m: Arrays = {}
        self.v: Arrays = {}

    def step(self, weights: Arrays, mean: Arrays, number: int) -> Arrays:
        f = to_float32
        rate, one = f(self.rate), 1.0
        found = {}
        for name, g in mean.items():
            w, g = weights[name].astype(np.float64), g.astype(np.float64)
            if self.kind == "sgd":
                found[name] = f(w - f(rate * g))
                continue
            m = self.m.get(name, np.zeros_like(g))
            if self.kind == "momentum":
                m = self.m[name] = to_narrow(f(f(f(0.9) * m) + g), self.formats["m"])
                found[name] = f(w - f(rate * m))
                continue
            v = self.v.get(name, np.zeros_like(g))
            b1, b2 = f(0.9), f(0.999)
            m = self.m[name] = to_narrow(f(f(b1 * m) + f(f(one - b1) * g)), self.formats["m"])
            v = f(f(b2 * v) + f(f(one - b2) * f(g * g)))
            v = self.v[name] = to_narrow(v, self.formats["v"])
            up = f(m / f(1 - 0.9**number))
            down = f(f(np.sqrt(f(v / f(1 - 0.999**number)))) + f(1e-8))
            found[name] = f(w - f(f(rate * up) / down))
        return found


def formats_of(kind: str, names: tuple[str, str]) -> dict[str, str]:
    return dict(zip(OPTIMIZERS[kind], names, strict=False))


@pytest.mark.parametrize("names", [("float32", "float32"), ("bfloat16", "float16"),
                                   ("float16", "bfloat16"), ("e5m6", "float8_e5m2")])  # fmt: skip
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_those_of_float64_with_roundings(kind: str, names: tuple[str, str]) -> None:
    chosen = formats_of(kind, names)
    own = Optimizer(kind, 0.01, {k: parse(v) for k, v in chosen.items()}, seed=3, place=5)
    replay = Replay(kind, 0.01, chosen)
    here, there = drawn(0), {k: w.astype(np.float64) for k, w in drawn(0).items()}
    for number in range(1, 8):
        mean = drawn(number, 0.03)
        here, there = own.step(here, mean, number), replay.step(there, mean, number)
        for name, weights in here.items():
            assert weights.dtype == np.float32
            assert np.array_equal(weights.astype(np.float64), there[name]), (number, name)
        for state in OPTIMIZERS[kind]:
            for name, kept in own.states[state].items():
                assert np.array_equal(kept.astype(np.float64), getattr(replay, state)[name])


def test_a_step_of_momentum_is_that_of_fractions() -> None:
    own = Optimizer("momentum", 0.01, {"m": parse("bf16")}, seed=0, place=1)
    weights = drawn(0)
    exact = [Fraction(float(w)) for w in weights["b"].reshape(-1)]
    m = [Fraction(0)] * len(exact)
    rate, decay = (Fraction(float(np.float32(x))) for x in (0.01, 0.9))
    for number in range(1, 6):
        mean = drawn(number, 0.03)
        weights = own.step(weights, mean, number)
        for k, g in enumerate(mean["b"].reshape(-1)):
            kept = to_fraction(decay * m[k], 24, -126)
            m[k] = to_fraction(to_fraction(kept + Fraction(float(g)), 24, -126), 8, -126)
            exact[k] = to_fraction(exact[k] - to_fraction(rate * m[k], 24, -126), 24, -126)
        assert [float(x) for x in exact] == weights["b"].astype(np.float64).reshape(-1).tolist()


def test_states_are_rounded_stochastically_with_bits_of_their_own() -> None:
    """Each state, array and step has random bits that no other has, and the mean is right."""
    kept = parse("bf16:sr")
    ones = {"a": np.full(20_001, 1 + 2**-9, np.float32)}
    stored = []
    for state_place in (0, 1):
        for number in (1, 2):
            own = Optimizer("momentum", 0.1, {"m": kept}, seed=5, place=1 + state_place)
            own.step({"a": np.zeros_like(ones["a"])}, ones, number)
            stored.append(own.states["m"]["a"].astype(np.float64))
    for values in stored:
        assert set(values.tolist()) == {1.0, 1 + 2**-7}
        share = float(np.mean(values > 1))  # a quarter of the way up
        assert abs(share - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 20_001)
    assert len({values.tobytes() for values in stored}) == 4
    adam = Optimizer("adam", 0.1, {"m": kept, "v": kept}, seed=5, place=1)
    adam.step({"a": np.zeros(20_001, np.float32)}, {"a": np.full(20_001, 0.1, np.float32)}, 1)
    up = {name: values["a"].astype("f8") for name, values in adam.states.items()}
    chosen = [values > values.min() for values in up.values()]
    assert abs(float(np.corrcoef(*chosen)[0, 1])) < 0.05
    expected = round_to(
        np.float32([0.1]) * (np.float32(1) - np.float32(0.9)) + np.zeros(20_001, np.float32),
        kernel_format(kept.dtype), rounding="stochastic", seed=5, call=1, place=1,
    )  # fmt: skip
    assert adam.states["m"]["a"].tobytes() == expected.tobytes()


# ---------------------------------------------------------------- clipping


@pytest.mark.parametrize("text", ["linear", "reverse", "tree", "linear accumulate=bfloat16",
                                  "exact"])  # fmt: skip
def test_the_norm_is_added_as_it_says(text: str) -> None:
    mean = drawn(4)
    squares = [
        to_fraction(Fraction(float(g)) ** 2, 24, -126) for a in mean.values() for g in a.reshape(-1)
    ]
    bits = (8, -126) if "bfloat16" in text else (24, -126)

    def added(values: list[Fraction]) -> Fraction:
        if text == "exact":
            return to_fraction(sum(values, Fraction(0)), 24, -126)
        if text == "tree":
            while len(values) > 1:
                pairs = [values[k : k + 2] for k in range(0, len(values), 2)]
                values = [to_fraction(sum(pair, Fraction(0)), *bits) for pair in pairs]
            return values[0]
        total, *rest = values[::-1] if text == "reverse" else values
        for value in rest:
            total = to_fraction(total + value, *bits)
        return total

    expected = np.float32(math.sqrt(float(added(squares))))
    norm = Clipping(1.0, gpusim.as_reduction(text)).norm(mean)
    assert norm == expected and norm.dtype == np.float32


def test_gradients_are_scaled_to_the_norm_and_smaller_ones_left() -> None:
    mean = drawn(4)
    clip = Clipping(0.5, Reduction(order="linear"))
    clipped, is_clipped = clip(mean)
    factor = to_float32(0.5 / clip.norm(mean).astype(np.float64))
    assert is_clipped and clip.norm(clipped) == pytest.approx(0.5, rel=1e-6)
    for name, g in clipped.items():
        assert np.array_equal(g.astype("f8"), to_float32(mean[name].astype("f8") * factor))
    large = Clipping(1e6, Reduction(order="linear"))
    assert large(mean) == (mean, False)
    with np.errstate(all="ignore"):
        mean["a"] = np.full(7, np.inf, np.float32)
        assert clip(mean) == (mean, False)


# ---------------------------------------------------------------- whole trainings


def sent_sum(stacked: np.ndarray, name: str, residual: np.ndarray | None) -> tuple[Any, Any]:
    """The messages of 7 replicas, added in linear order; the sum and the residuals."""
    x = stacked.astype(np.float64)
    if residual is not None:
        x = to_float32(x + residual)
    if name == "float32":
        sent, factor = x, 1.0
    else:
        room = NARROW[name][2] / 2 / (np.abs(x).max() * len(x))
        factor = 2.0 ** math.floor(math.log2(room)) if 0 < room < np.inf else 1.0
        factor = min(max(factor, 2.0**-60), 2.0**60)
        sent = to_narrow(to_float32(x * factor), name)
    hop = {"bfloat16": "float32", "float32": "float32"}.get(name, name)  # what partial sums are in
    total = sent[0]
    for member in sent[1:]:
        total = to_narrow(total + member, hop)
    total = to_narrow(total, name)
    return to_float32(total / (len(x) * factor)), to_float32(x - to_float32(sent / factor))


def replayed(kind: str, name: str, states: dict[str, str], master: str | None, rate: float,
             clip: float | None, feedback: bool) -> np.ndarray:  # fmt: skip
    """The weights after an epoch: the study's own loop, written out in float64."""
    data = digits.load(7, 0)
    network = gpusim.vmap(digits.loss_and_gradients, in_axes=(None, 0, 0))
    kept_in = master or name
    kept = {k: to_narrow(w, kept_in) for k, w in digits.initial(0).items()}
    replay = Replay(kind, rate, states)
    residuals: dict[str, Any] = dict.fromkeys(kept)
    for number, (images, labels) in enumerate(data.deal(1), 1):
        weights = {k: to_narrow(w, name).astype(np.float32) for k, w in kept.items()}
        _, gradients = network(weights, images.astype("f4"), labels.astype("f4"))
        mean = {}
        for k, g in gradients.items():
            mean[k], left = sent_sum(g, name, residuals[k])
            residuals[k] = left if feedback else None
        if clip is not None:
            total = None
            for g in mean.values():
                for square in to_float32(g * g).reshape(-1):
                    total = square if total is None else float(to_float32(total + square))
            norm = to_float32(math.sqrt(total or 0.0))
            if norm > clip:
                factor = to_float32(to_float32(clip) / norm)
                mean = {k: to_float32(g * factor) for k, g in mean.items()}
        moved = replay.step(kept, mean, number)
        kept = {k: to_narrow(w, kept_in) for k, w in moved.items()}
    return np.concatenate([w.reshape(-1) for w in kept.values()])


CASES = [
    ("sgd", "bfloat16", "", None, None, False),
    ("sgd", "float16", "", None, 0.05, True),
    ("sgd", "bfloat16", "", "float32", None, True),
    ("momentum", "float16", "m=bf16", "float32", 0.05, False),
    ("momentum", "bfloat16", "m=fp16", None, None, True),
    ("adam", "bfloat16", "m=bf16+v=fp32", None, 0.05, True),
    ("adam", "float16", "m=fp16+v=bf16", "float32", 0.02, True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_training_is_that_of_float64_with_roundings(case: tuple[Any, ...]) -> None:
    kind, name, states, master, clip, feedback = case
    found = train(
        [name], replicas=7, epochs=1, rate=0.01, optimizer=kind, state_formats=states or None,
        master=master, clip=clip, clip_norm="linear", error_feedback=feedback,
    )  # fmt: skip
    kept = {k: v.text for k, v in parse_states(states, kind)} if states else {}
    expected = replayed(kind, name, kept, master, 0.01, clip, feedback)
    run = found.runs[1]
    assert np.array_equal(run.weights[-1].astype(np.float64), expected)
    assert (clip is None) == (not run.clipped.any())


# ---------------------------------------------------------------- what it shows


def progress_of(found: Training) -> list[float]:
    return [row["progress"] for row in found.table]


def test_error_feedback_returns_what_coarse_messages_lose() -> None:
    options: dict[str, Any] = {"weights": False, "epochs": 20, "replicas": 7}
    plain, fed = (train(["float8_e5m2"], **options, error_feedback=e).runs for e in (False, True))
    assert np.array_equal(plain[0].weights[-1], fed[0].weights[-1])  # float32 loses next to nothing

    def distance(runs: Any) -> float:
        return float(np.linalg.norm(runs[1].weights[-1].astype("f8") - runs[0].weights[-1]))

    assert distance(fed) < 0.9 * distance(plain)


def test_master_weights_keep_small_updates() -> None:
    without, with_master = (
        progress_of(train(["bf16"], epochs=6, master=master))[1] for master in (None, "fp32")
    )
    assert without < 0.7 < 0.95 < with_master


def test_a_second_moment_in_float16_vanishes() -> None:
    found = train(state_formats="bf16,fp16", optimizer="adam", epochs=2)
    assert [row["format"] for row in found.table] == [
        "float32", "float32; states bfloat16", "float32; states float16",
    ]  # fmt: skip
    _, bfloat16, float16 = progress_of(found)
    assert 0.9 < bfloat16 < 1.1 and float16 > 100


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"state_formats": "bf16"}, "state_formats needs an optimizer with states"),
        ({"optimizer": "adagrad"}, "optimizer='adagrad': expected one of sgd, momentum, adam"),
        ({"optimizer": "momentum", "state_formats": "v=bf16"}, "momentum has the states m"),
        ({"optimizer": "adam", "state_formats": "x"}, "state_formats='x'"),
        ({"formats": "bf16:up"}, "formats='bf16:up': expected nearest, stochastic or sr"),
        ({"clip": -1.0}, "clip=-1.0: expected a finite number above 0"),
        ({"clip": 1.0, "clip_norm": "linear op=max"}, "expected op='sum'"),
        ({"clip": 1.0, "clip_norm": "rng"}, "did you mean 'ring'"),
        ({"master": "fp64"}, "master='fp64': expected float32 or narrower"),
        ({"master": "fp32", "weights": False}, "master='fp32': expected weights in the format"),
        ({"error_feedback": True, "gradients": False}, "error_feedback: expected gradients"),
        ({"seeds": 0}, "seeds=0: expected at least 1"),
        ({"rate": math.inf}, "expected positive numbers"),
        ({"formats": "fp32"}, "expected at least one beside float32"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        train(**given)


def test_short_names_are_those_of_the_formats() -> None:
    for short, name in (("bf16:sr", "bfloat16:stochastic"), ("fp8", "float8_e4m3fn"),
                        ("fp16:rne", "float16"), ("fp32:sr", "float32")):  # fmt: skip
        assert parse(short).text == name
