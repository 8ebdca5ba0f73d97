"""The decomposition table of traces.

Decomposed are random operators, operators whose kernels depend on values, and operators that change
values in place that replicas share.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from ...torch.private import is_transformed, schema_of
from .draws import Draws
from .random_operators import TABLE, is_random

__all__ = ["Untraceable", "check_traced", "table"]

aten = torch.ops.aten


class Untraceable(Exception):
    """A model that a graph of one replica cannot stand for."""


def table(draws: Callable[[], Draws]) -> dict[Any, Callable[..., Any]]:
    """A decomposition table for make_fx; random operators draw from `draws()`."""

    def drawn(rule: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: rule(draws(), *args, **kwargs)

    rules = {target: drawn(rule) for target, rule in TABLE.items()}
    rules |= {target: target.decompose for target in COMPOSITES}
    rules |= {target: _without_dropout_only(target) for target in RECURRENT}
    return rules | {aten.one_hot.default: _one_hot, ATTENTION: _attention}


COMPOSITES = [
    getattr(aten, name).default
    for name in (
        "alpha_dropout",
        "alpha_dropout_",
        "feature_dropout",
        "feature_dropout_",
        "feature_alpha_dropout",
        "feature_alpha_dropout_",
        "_scaled_dot_product_attention_math",
    )
]
"""Operators that are decomposed into random operators of the table."""

RECURRENT = [
    getattr(getattr(aten, name), overload)
    for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    for overload in ("input", "data")
]
"""Operators whose kernels change values in place that are the same on all replicas: `passes` sees
only the in-place operators that they are decomposed into."""


def _without_dropout_only(target: Any) -> Callable[..., Any]:
    """Decompose the operator unless it has dropout, which torch's decomposition ignores."""
    names = [argument.name for argument in schema_of(target).arguments]
    dropout, train = names.index("dropout"), names.index("train")

    def decompose(*args: Any) -> Any:
        return NotImplemented if args[dropout] and args[train] else target.decompose(*args)

    return decompose


ATTENTION = aten.scaled_dot_product_attention.default


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Decompose attention with dropout."""
    dropout = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return ATTENTION.decompose(*args, **kwargs) if dropout else NotImplemented


def _one_hot(x: Tensor, classes: int = -1) -> Tensor:
    """one_hot without torch's check of the values."""
    if classes < 0:
        raise Untraceable("one_hot without num_classes looks at values")
    return (x.unsqueeze(-1) == torch.arange(classes, device=x.device)).to(torch.int64)


def check_traced(node: Node, own: Container[int]) -> None:
    """Raise Untraceable for a node that does something else in a graph than in the model.

    `own` are the ids of the model's parameters and buffers, which have to be arguments of the
    graph.
    """

    if node.op == "get_attr":
        constant = getattr(node.graph.owning_module, str(node.target))
        if id(constant) in own:
            raise Untraceable("a function that torch does not see uses a parameter or buffer")
        if isinstance(constant, Tensor) and is_transformed(constant):
            raise Untraceable("a collective is called inside a vmap or grad of the model's own")
    if is_random(node.target) and not _without_dropout(node):
        raise Untraceable(f"{node.target} draws random numbers that replicas have no stream for")


def _without_dropout(node: Node) -> bool:
    """Whether a random operator draws nothing: its argument dropout_p is 0."""
    schema = schema_of(node.target).arguments
    for place, argument in enumerate(schema):
        if argument.name in ("dropout_p", "dropout"):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            return not (argument.default_value if value is None else value)
    return False
