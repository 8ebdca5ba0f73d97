"""The programs that are measured, written for one replica: the same for gpusim and for JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.cases import SOURCE, Case

Program = Callable[..., Any]


def program(case: Case, lax: Any, **how: Any) -> Program:
    """The case's function of one replica's arguments.

    `lax` is gpusim's or JAX's; `how` are further arguments of sums.
    """
    made: dict[str, Program] = {
        "psum": lambda x: lax.psum(x, "i", **how),
        "pmean": lambda x: lax.pmean(x, "i", **how),
        "pmax": lambda x: lax.pmax(x, "i"),
        "psum_scatter": lambda x: lax.psum_scatter(x, "i", **how),
        "all_gather": lambda x: lax.all_gather(x, "i"),
        "pbroadcast": lambda x: lax.pbroadcast(x, "i", SOURCE),
        "all_to_all": lambda x: lax.all_to_all(x, "i", 0, 0),
        "ppermute": lambda x: lax.ppermute(x, "i", case.permutation()),
    }
    if case.ragged:
        return lambda *operands: lax.ragged_all_to_all(*operands, axis_name="i")
    return made[case.collective]
