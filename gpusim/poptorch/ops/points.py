"""Sets of points: farthest point sampling and nearest neighbours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..poptorch_core import createPoptorchError
from .host import HOST, HostFunction, Like, on_host
from .operation import operation

__all__ = ["fps", "nearest"]


@operation
def fps(src: Tensor, ptr: list[int], ratio: float = 0.5, random_start: bool = False) -> Tensor:
    """Farthest point sampling: each point of a sample is the one farthest from those before it.

    **Arguments**

    - `src`: (points, features).
    - `ptr`: the begins of the sets of points and the end of the last one: a list of at least two
      integers, increasing from 0 to the number of points. Each set has its own sample.
    - `ratio`: the size of a sample, as a part of its set, rounded up: above 0, at most 1.
    - `random_start`: whether a sample begins with a random point, or with the first of the set.

    **Returns**

    int64 indices of rows of `src`, set by set. The first of several farthest points is taken.

    **Raises**: poptorch.Error for arguments of other types; ValueError for other values.

    >>> import torch
    >>> fps(torch.tensor([[0.0], [1.0], [5.0], [9.0]]), [0, 4], ratio=0.75)
    tensor([0, 3, 2])
    """
    if not isinstance(src, Tensor):
        raise createPoptorchError(
            f"`fps` must take a torch.tensor input. {type(src)} is not supported."
        )
    if not isinstance(ptr, list) or not all(isinstance(place, int) for place in ptr):
        raise createPoptorchError("`ptr` must be a list of integers.")
    if len(ptr) < 2:
        raise createPoptorchError("`ptr` must containt at least 2 elements.")
    if not isinstance(ratio, float):
        raise createPoptorchError(f"`ratio` must be of float type. {type(ratio)} is not supported.")
    if not isinstance(random_start, bool):
        raise createPoptorchError(
            f"`random_start` must be of bool type. {type(random_start)} is not supported."
        )
    if src.dim() != 2 or ptr != sorted(ptr) or ptr[0] != 0 or ptr[-1] != src.shape[0]:
        raise ValueError(
            "fps: `ptr` must increase from 0 to the number of points in `src` (points, features), "
            f"got {ptr} for shape {tuple(src.shape)}"
        )
    if not 0 < ratio <= 1:
        raise ValueError(f"fps: `ratio` must be above 0 and at most 1, got {ratio}")
    counts = [math.ceil((end - begin) * ratio) for begin, end in pairwise(ptr)]
    sizes = torch.tensor(ptr, device=src.device).diff()
    at = torch.rand(len(counts), device=src.device) if random_start else torch.zeros(len(counts))
    first = (at.to(src.device) * sizes).long().minimum(sizes - 1)
    return on_host("fps", [src, first], ptr=ptr, counts=counts)[0]


def _likes(operands: Sequence[Like], arguments: dict[str, Any]) -> list[Like]:
    return [Like((sum(arguments["counts"]),), torch.int64)]


def _compute(operands: list[Tensor], arguments: dict[str, Any]) -> list[Tensor]:
    points = operands[0].double().numpy()
    ptr, samples = arguments["ptr"], []
    firsts = operands[1].tolist()
    for (begin, end), count, first in zip(pairwise(ptr), arguments["counts"], firsts, strict=True):
        own, chosen = points[begin:end], [first] if count else []
        squares = ((own - own[chosen]) ** 2).sum(-1) if count else None
        while squares is not None and len(chosen) < count:
            chosen.append(int(squares.argmax()))
            squares = squares.clip(max=((own - own[chosen[-1]]) ** 2).sum(-1))
        samples += [begin + place for place in chosen]
    return [torch.tensor(samples, dtype=torch.int64)]


HOST["fps"] = HostFunction(_likes, _compute)


@operation
def nearest(
    x: Tensor,
    y: Tensor,
    batch_x: list[int] | Tensor | None = None,
    batch_y: list[int] | Tensor | None = None,
) -> Tensor:
    """For each point of `x`, the nearest one of `y`.

    **Arguments**

    - `x`, `y`: (points, features), or (points,) for one feature.
    - `batch_x`, `batch_y`: the set that each point belongs to, a list or a tensor of integers. The
      nearest point is one of the same set; each set of x needs points in y. None: one set.

    **Returns**

    int64 indices of rows of `y`, one for each row of `x`; the first of several nearest points.

    **Raises**: poptorch.Error for arguments of other types.


    >>> import torch
    >>> x, y = torch.tensor([[0.0], [4.0], [9.0]]), torch.tensor([[1.0], [10.0]])
    >>> nearest(x, y)
    tensor([0, 0, 1])
    >>> nearest(x, y, [0, 1, 1], [0, 1])
    tensor([0, 1, 1])
    """
    for name, value in (("x", x), ("y", y)):
        if not isinstance(value, Tensor):
            raise createPoptorchError(
                f"`nearest` must take a torch.tensor `{name}` input. {type(value)} is not "
                "supported."
            )
    sets = [[] if batch is None else batch for batch in (batch_x, batch_y)]
    if not all(isinstance(batch, (list, Tensor)) for batch in sets):
        raise createPoptorchError(
            "`batch_x` and `batch_y` must be torch.Tensors or lists while `batch_x` is of type "
            f"{type(batch_x)} and `batch_y` is of type {type(batch_y)}."
        )
    of_x, of_y = (_sets(batch, of) for batch, of in zip(sets, (x, y), strict=True))
    points, others = (value.detach().float().reshape(value.shape[0], -1) for value in (x, y))
    squares = (points.unsqueeze(1) - others.unsqueeze(0)).square().sum(-1)
    elsewhere = of_x.unsqueeze(1) != of_y.unsqueeze(0)
    return squares.masked_fill(elsewhere, math.inf).argmin(-1)


def _sets(batch: list[int] | Tensor, points: Tensor) -> Tensor:
    if isinstance(batch, list) and not batch:
        return torch.zeros(points.shape[0], dtype=torch.int64, device=points.device)
    return torch.as_tensor(batch, device=points.device)
