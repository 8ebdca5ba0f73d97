"""Settings of the per-replica fallback: whether every function takes it, whether its uses are
reported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple


class FallbackSettings(NamedTuple):
    """Settings of the per-replica fallback.

    **Attributes**:

    - `force`: every function is called per replica, batched rule or not.
    - `report`: functions that are called per replica are logged.
    """

    force: bool
    report: bool


def _environment_flag(name: str) -> bool:
    return os.environ.get(name, "0").strip().lower() not in ("", "0", "false", "no", "off")


_settings: ContextVar[FallbackSettings | None] = ContextVar(
    "gpusim per-replica fallback", default=None
)


def fallback_settings() -> FallbackSettings:
    """The settings of the innermost `per_replica_route`, else those of the environment."""
    chosen = _settings.get()
    if chosen is None:
        chosen = FallbackSettings(
            _environment_flag("GPUSIM_FORCE_PER_REPLICA"),
            _environment_flag("GPUSIM_REPORT_PER_REPLICA"),
        )
        _settings.set(chosen)
    return chosen


@contextmanager
def per_replica_route(*, force: bool | None = None, report: bool | None = None) -> Iterator[None]:
    """Force or report the slow code path of vmap and shard_map, which calls a function once per
    replica.

    NumPy functions without a batched rule always take it. The results are the same bits.

    **Arguments**:

    - `force`: call every function once per replica (to compare a batched rule with it).
    - `report`: log each function that is called once per replica, with the number of calls and the
      line that called it, as a warning of the logger ``gpusim.maps``.

    The environment variables GPUSIM_FORCE_PER_REPLICA and GPUSIM_REPORT_PER_REPLICA set to 1 do the
    same for a whole process.

    >>> import numpy as np, gpusim
    >>> with gpusim.per_replica_route(force=True):
    ...     gpusim.vmap(np.sort)(np.array([[3, 1], [4, 2]]))
    array([[1, 3],
           [2, 4]])
    """
    now = fallback_settings()
    token = _settings.set(
        FallbackSettings(
            now.force if force is None else bool(force),
            now.report if report is None else bool(report),
        )
    )
    try:
        yield
    finally:
        _settings.reset(token)
