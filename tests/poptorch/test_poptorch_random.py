"""Random numbers of a model: each replica's own, the same in lockstep and in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gpusim
from gpusim.poptorch.replicas import AXIS
from tests.poptorch.replica_models import BATCH, WIDTH, Model, assert_same, inputs, mean, run

RANDOM: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "rand": lambda self, x: torch.rand(BATCH, WIDTH),
    "rand_like": lambda self, x: torch.rand_like(x),
    "randn": lambda self, x: torch.randn(BATCH, WIDTH),
    "randn_like": lambda self, x: torch.randn_like(x, dtype=torch.float64).float(),
    "uniform_": lambda self, x: torch.empty(BATCH, WIDTH).uniform_(-1, to=2),
    "normal_": lambda self, x: torch.empty(BATCH, WIDTH).normal_(mean=1, std=2),
    "normal of numbers": lambda self, x: torch.normal(1.0, 2.0, (BATCH, WIDTH)),
    "normal of means": lambda self, x: torch.normal(x, 2.0),
    "normal of deviations": lambda self, x: torch.normal(1.0, x.abs()),
    "normal of both": lambda self, x: torch.normal(x, x.abs()),
    "log_normal_": lambda self, x: torch.empty(BATCH, WIDTH).log_normal_(),
    "exponential_": lambda self, x: torch.empty(BATCH, WIDTH).exponential_(2.0),
    "cauchy_": lambda self, x: torch.empty(BATCH, WIDTH).cauchy_(),
    "geometric_": lambda self, x: torch.empty(BATCH, WIDTH).geometric_(0.3),
    "bernoulli": lambda self, x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda self, x: torch.bernoulli(x, 0.25),
    "bernoulli_": lambda self, x: torch.empty(BATCH, WIDTH).bernoulli_(0.25),
    "bernoulli_ of chances": lambda self, x: torch.empty(BATCH, WIDTH).bernoulli_(x.sigmoid()),
    "randint": lambda self, x: torch.randint(-3, 9, (BATCH, WIDTH)).float(),
    "randint_like": lambda self, x: torch.randint_like(x, 9),
    "random_": lambda self, x: torch.zeros(BATCH, WIDTH, dtype=torch.int32).random_(5).float(),
    "randperm": lambda self, x: x[torch.randperm(BATCH)],
    "multinomial": lambda self, x: torch.multinomial(x.softmax(-1), 3).float() @ x[:3],
    "multinomial with replacement": lambda self, x: (
        torch.multinomial(x.softmax(-1), BATCH, replacement=True).float() @ x
    ),
    "dropout": lambda self, x: F.dropout(x, 0.4),
    "dropout in place": lambda self, x: F.dropout(x + 1, 0.4, inplace=True),
    "dropout of channels": lambda self, x: F.dropout1d(x, 0.4),
    "alpha_dropout": lambda self, x: F.alpha_dropout(x, 0.4, training=True),
    "gumbel_softmax": lambda self, x: F.gumbel_softmax(x, hard=True),
    "attention with dropout": lambda self, x: F.scaled_dot_product_attention(
        x, x, x, dropout_p=0.4
    ),
}
"""What torch draws, of shape (BATCH, WIDTH)."""


def drawing(name: str) -> Model:
    return Model(lambda self, x: (RANDOM[name](self, x), mean(RANDOM[name](self, x) @ self.w)))


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_the_same_in_lockstep_and_in_threads(name: str) -> None:
    model, given = drawing(name), inputs(1)
    given = [given[0].expand(3, -1, -1).contiguous()]
    steps = [run(model, given, execution, counter=2)[1] for execution in ("lockstep", "threads")]
    assert_same(*steps, bits=False)
    drawn = steps[0].outputs[0]
    assert drawn.shape == (3, BATCH, WIDTH)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("name", ["rrelu", "poisson", "lstm"])
def test_what_has_no_stream_is_seeded_for_each_replica(name: str) -> None:
    kinds: dict[str, Callable[[Model, Tensor], Tensor]] = {
        "rrelu": lambda self, x: F.rrelu(x, training=True),
        "poisson": lambda self, x: torch.poisson(x.abs() * 20),
        "lstm": lambda self, x: self.inner[0](x)[0],
    }
    modules = [nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5)] if name == "lstm" else []
    model = Model(
        lambda self, x: (kinds[name](self, x), mean(kinds[name](self, x) @ self.w)), *modules
    )
    given = [inputs(1)[0].expand(3, -1, -1).contiguous()]
    torch.manual_seed(0)
    program, first = run(model, given, None)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    _, again = run(model, given, None)
    assert program.execution == "threads"
    assert torch.equal(torch.get_rng_state(), before)  # the program's own numbers are untouched
    assert_same(first, again)
    assert not torch.equal(first.outputs[0][0], first.outputs[0][1])


def test_random_numbers_are_those_of_gpusim_rng() -> None:
    def forward(self: Model, x: Tensor) -> tuple[Tensor, ...]:
        shape = (BATCH, WIDTH)
        return torch.rand(shape), torch.randn(shape), torch.randint(3, 90, shape), mean(self.w)

    _, step = run(Model(forward), inputs(3), "lockstep", counter=5, seed=2**64 - 3)
    generator = gpusim.rng(2**64 - 3, AXIS, calls=5 << 20)

    def draw() -> tuple[Any, ...]:
        shape = (BATCH, WIDTH)
        return generator.uniform(shape), generator.normal(shape), generator.integers(3, 90, shape)

    expected = gpusim.vmap(draw, axis_name=AXIS, axis_size=3)()
    for got, wanted in zip(step.outputs, expected, strict=False):
        assert np.array_equal(got.numpy(), wanted)


def test_dropout_drops_and_scales_and_its_gradient_does_too(execution: str) -> None:
    model = Model(lambda self, x: (y := F.dropout(self.w + 0 * x[0], 0.25), mean(y)))
    _, step = run(model, inputs(5), execution)
    kept = step.outputs[0] != 0
    torch.testing.assert_close(step.outputs[0][kept], (model.w.expand(5, -1, -1) / 0.75)[kept])
    torch.testing.assert_close(step.gradients["w"], kept / 0.75 / WIDTH**2)
    assert 0.4 < kept.float().mean() < 1


def test_random_numbers_depend_on_seed_counter_and_replica_alone() -> None:
    model, given = drawing("randn"), inputs(4)
    _, all_four = run(model, given, "lockstep", counter=3, seed=1)
    _, last_two = run(
        model, [x[2:] for x in given], "lockstep", counter=3, seed=1, replica_offset=2
    )
    assert torch.equal(all_four.outputs[0][2:], last_two.outputs[0])
    for counter, seed in ((4, 1), (3, 2)):
        _, other = run(model, given, "lockstep", counter=counter, seed=seed)
        assert not torch.equal(other.outputs[0], all_four.outputs[0])


def test_two_operators_draw_different_numbers(execution: str) -> None:
    model = Model(lambda self, x: (torch.rand(4), torch.rand(4), mean(self.w)))
    _, step = run(model, inputs(2), execution)
    assert not torch.equal(step.outputs[0], step.outputs[1])
