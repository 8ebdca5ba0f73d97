"""Other sizes in `fallback.limits`, for tests of every code path on small arrays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gpusim.fallback import blocks, limits


@contextmanager
def fold_limits(**sizes: int) -> Iterator[None]:
    """Plan folds with these sizes inside the `with` block; the cache of plans is dropped."""
    blocks.plan_blocks.cache_clear()
    try:
        with mock.patch.multiple(limits, **sizes):
            yield
    finally:
        blocks.plan_blocks.cache_clear()
