"""The choice of who folds on a device: `sends` with a wire or levels, `folding` otherwise."""

from __future__ import annotations

from typing import Any

from numpy.typing import ArrayLike

from gpusim.fallback.spec import FoldPart, FoldSpec

from .device import Array, Device
from .folding import fold_members
from .sends import fold_sent


def run_fold(
    device: Device,
    spec: FoldSpec,
    members: Any,
    *,
    batch_ndim: int = 0,
    call: int = 0,
    batch_offset: ArrayLike = 0,
    part: FoldPart | None = None,
    out: Any = None,
) -> Array:
    """`fallback.run_fold` for arrays of `device`: the same arguments, errors and bits."""
    numbers: dict[str, Any] = {"batch_ndim": batch_ndim, "call": call, "batch_offset": batch_offset}
    if spec.in_phases and part is None:
        return fold_sent(device, spec, members, **numbers, out=out)
    return fold_members(device, spec, members, **numbers, part=part, out=out)
