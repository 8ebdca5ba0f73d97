"""Small calls: they take few Python calls. There is no clock here; `make bench` has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import gpusim
from gpusim import collectives, lax
from gpusim.collectives.fold import fold_spec
from gpusim.fallback.blocks import plan_blocks
from tests.oracles.python_calls import python_calls

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16)


def total(x: Any) -> Any:
    return lax.psum(x, "i")


def by_text(x: Any) -> Any:
    return lax.psum(x, "i", reduction="linear seed=1")


CONSECUTIVE = [[0, 1, 2, 3], [4, 5, 6, 7]]
SCATTERED = [[0, 3, 5, 6], [1, 2, 4, 7]]


def by_groups(groups: list[list[int]]) -> Callable[[Any], Any]:
    return gpusim.vmap(lambda x: lax.psum(x, "i", axis_index_groups=groups), axis_name="i")


CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "identity": (gpusim.vmap(lambda x: x, axis_name="i"), 27),
    "psum": (gpusim.vmap(total, axis_name="i"), 39),
    "psum by a text": (gpusim.vmap(by_text, axis_name="i"), 39),
    "psum in groups": (by_groups(CONSECUTIVE), 110),
    "psum in scattered groups": (by_groups(SCATTERED), 99),
    "psum, map made anew": (lambda x: gpusim.vmap(total, axis_name="i")(x), 46),
    "psum of a tree": (gpusim.vmap(lambda x: total({"a": x, "b": x}), axis_name="i"), 121),
    "psum of an integer": (gpusim.vmap(lambda x: x + lax.psum(1, "i"), axis_name="i"), 58),
    "all_gather": (gpusim.vmap(lambda x: lax.all_gather(x, "i"), axis_name="i"), 76),
    "psum of stacked arrays": (collectives.psum, 35),
    "psum of stacked arrays by a text": (partial(collectives.psum, reduction="linear seed=1"), 35),
}


@pytest.mark.parametrize("name", CASES)
def test_small_calls_take_few_python_calls(name: str) -> None:
    for cached in (fold_spec, plan_blocks):
        cached.cache_clear()  # a key that is equal, but another object, is compared in Python
    call, most = CASES[name]
    found = python_calls(lambda: call(X))
    assert len(found) <= most, found
