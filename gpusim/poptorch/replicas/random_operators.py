"""Rules for torch's random operators, as draws from streams.

Rules of operators whose names end in an underscore change their first operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .draws import Draws, Size

__all__ = ["TABLE", "is_random"]

aten = torch.ops.aten

Rule = Callable[..., Tensor]


def _new(kind: str, *bounds: float) -> Rule:
    def rule(
        draws: Draws, size: Size, *, dtype: Any = None, device: Any = None, **_: Any
    ) -> Tensor:
        return draws(kind, bounds, size, dtype, device)

    return rule


def _like(kind: str, *bounds: float) -> Rule:
    def rule(draws: Draws, x: Tensor, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return draws(kind, bounds, x.shape, dtype or x.dtype, device or x.device)

    return rule


def _fill(kind: str, *defaults: float) -> Rule:
    def rule(draws: Draws, x: Tensor, *bounds: float, **named: Any) -> Tensor:
        chosen = [*bounds, *defaults[len(bounds) :]]
        for place, name in enumerate(NAMES[kind]):
            chosen[place] = named.get(name, chosen[place])
        return x.copy_(draws.like(x, kind, *chosen))

    return rule


NAMES = {"uniform": ("from", "to"), "normal": ("mean", "std"), "bernoulli": ("p",)}


def _of_uniform(make: Callable[..., Tensor], *defaults: float) -> Rule:
    """A rule that transforms uniform numbers into another distribution, in place."""

    def rule(draws: Draws, x: Tensor, *parameters: float, **_: Any) -> Tensor:
        u = draws("uniform", (0, 1), x.shape, torch.float64, x.device)
        return x.copy_(make(u, *parameters, *defaults[len(parameters) :]).to(x.dtype))

    return rule


def _exponential(u: Tensor, rate: float) -> Tensor:
    return -torch.log1p(-u) / rate


def _cauchy(u: Tensor, median: float, sigma: float) -> Tensor:
    return median + sigma * torch.tan(math.pi * (u - 0.5))


def _geometric(u: Tensor, p: float) -> Tensor:
    return torch.ceil(torch.log1p(-u) / math.log1p(-p)).clamp(min=1)


def _with_probabilities(draws: Draws, p: Tensor) -> Tensor:
    return draws("uniform", (0, 1), p.shape, torch.float64, p.device) < p


def _bernoulli_of(draws: Draws, p: Tensor, **_: Any) -> Tensor:
    return _with_probabilities(draws, p).to(p.dtype)


def _bernoulli_like(draws: Draws, x: Tensor, p: float = 0.5, **_: Any) -> Tensor:
    return draws.like(x, "bernoulli", p)


def _bernoulli_in_place(draws: Draws, x: Tensor, p: Tensor, **_: Any) -> Tensor:
    return x.copy_(_with_probabilities(draws, p.expand(x.shape)).to(x.dtype))


def _normal_around(draws: Draws, mean: Any, std: Any = 1.0, **_: Any) -> Tensor:
    like = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(*(x.shape for x in (mean, std) if isinstance(x, Tensor)))
    return draws("normal", (0, 1), shape, like.dtype, like.device) * std + mean


def _normal_of(draws: Draws, mean: float, std: float, size: Size, **options: Any) -> Tensor:
    return _new("normal", mean, std)(draws, size, **options)


def _log_normal(draws: Draws, x: Tensor, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return x.copy_(draws.like(x, "normal", mean, std).exp())


def _integers_to(draws: Draws, high: int, size: Size, **options: Any) -> Tensor:
    return _integers_from(draws, 0, high, size, **options)


def _integers_from(draws: Draws, low: int, high: int, size: Size, **options: Any) -> Tensor:
    options["dtype"] = options.get("dtype") or torch.int64
    return _new("integers", low, high)(draws, size, **options)


def _integers_like(draws: Draws, x: Tensor, *bounds: int, **options: Any) -> Tensor:
    low, high = (0, *bounds) if len(bounds) == 1 else bounds
    return _like("integers", low, high)(draws, x, **options)


def _any_integer(draws: Draws, x: Tensor, *bounds: int | None, **_: Any) -> Tensor:
    if x.dtype.is_floating_point:
        whole = 2 ** {2: 8, 4: 24, 8: 53}[x.itemsize] if x.dtype != torch.float16 else 2**11
    else:
        whole = torch.iinfo(x.dtype).max + (x.dtype != torch.int64) if x.dtype != torch.bool else 2
    known = [bound for bound in bounds if bound is not None]
    low, high = known if len(known) == 2 else (0, *(known or [whole]))
    if len(bounds) == 2 and bounds[1] is None:
        low, high = bounds[0] or 0, whole
    return x.copy_(draws.like(x, "integers", low, high))


def _permutation_of(
    draws: Draws, n: int, *, dtype: Any = None, device: Any = None, **_: Any
) -> Tensor:
    return draws("permutation", (), (n,), dtype or torch.int64, device)


def _multinomial(
    draws: Draws, probabilities: Tensor, count: int, replacement: bool = False, **_: Any
) -> Tensor:
    if replacement:
        steps = probabilities.double().cumsum(-1)
        shape = (*probabilities.shape[:-1], count)
        u = draws("uniform", (0, 1), shape, torch.float64, probabilities.device) * steps[..., -1:]
        return (u.unsqueeze(-1) >= steps.unsqueeze(-2)).sum(-1)
    u = draws("uniform", (0, 1), probabilities.shape, torch.float64, probabilities.device)
    return (probabilities.double() / _exponential(u, 1.0)).topk(count, -1).indices


def _dropout(draws: Draws, x: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train or not x.numel():
        return x
    if p == 1:
        return x * x.new_zeros(())
    return x * (draws.like(x, "bernoulli", 1 - p) / (1 - p))


def _dropout_in_place(draws: Draws, x: Tensor, p: float, train: bool) -> Tensor:
    return x.copy_(_dropout(draws, x, p, train))


def _native_dropout(draws: Draws, x: Tensor, p: float, train: bool | None) -> Any:
    if p == 0 or train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = draws.like(x, "bernoulli", 1 - p)
    return x * (mask * (0.0 if p == 1 else 1 / (1 - p))), mask.bool()


TABLE: dict[Any, Rule] = {
    aten.rand.default: _new("uniform", 0, 1),
    aten.rand.generator: _new("uniform", 0, 1),
    aten.rand_like.default: _like("uniform", 0, 1),
    aten.randn.default: _new("normal", 0, 1),
    aten.randn.generator: _new("normal", 0, 1),
    aten.randn_like.default: _like("normal", 0, 1),
    aten.uniform_.default: _fill("uniform", 0, 1),
    aten.normal_.default: _fill("normal", 0, 1),
    aten.normal.float_float: _normal_of,
    aten.normal.Tensor_float: _normal_around,
    aten.normal.float_Tensor: _normal_around,
    aten.normal.Tensor_Tensor: _normal_around,
    aten.log_normal_.default: _log_normal,
    aten.bernoulli.default: _bernoulli_of,
    aten.bernoulli.p: _bernoulli_like,
    aten.bernoulli_.float: _fill("bernoulli", 0.5),
    aten.bernoulli_.Tensor: _bernoulli_in_place,
    aten.exponential_.default: _of_uniform(_exponential, 1.0),
    aten.cauchy_.default: _of_uniform(_cauchy, 0.0, 1.0),
    aten.geometric_.default: _of_uniform(_geometric),
    aten.randint.default: _integers_to,
    aten.randint.low: _integers_from,
    aten.randint_like.default: _integers_like,
    aten.randint_like.low_dtype: _integers_like,
    aten.random_.default: _any_integer,
    aten.random_.to: _any_integer,
    aten.random_.__getattr__("from"): _any_integer,
    aten.randperm.default: _permutation_of,
    aten.multinomial.default: _multinomial,
    aten.dropout.default: _dropout,
    aten.dropout_.default: _dropout_in_place,
    aten.native_dropout.default: _native_dropout,
}


def is_random(operator: Any) -> bool:
    """Whether an operator of torch draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
