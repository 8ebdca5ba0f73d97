"""Random folds with wires, in all layouts: the kernels for a host have the bits of fallback."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from gpusim import Reduction, Wire
from gpusim.collectives.fold import fold_spec
from gpusim.cuda import sending
from gpusim.fallback import run_fold
from gpusim.fallback.spec import FoldSpec
from tests.contract.test_wires import ACCUMULATORS, FORMATS, ORDERS, REALS, WIDE, numbers
from tests.cuda.host_cuda.device import HostDevice
from tests.cuda.host_cuda.values import same
from tests.oracles.budget import budget, seeds

BLOCKS: list[Any] = [None, "row", 1, 2, 3, 4, 7, 16, 31, 32, 33, 64, 100, 128, 300, 1000]
LENGTHS = [1, 3, 5, 7, 8, 16, 32, 33, 64, 100]
#: Threads that fill a device. 0 is HostDevice's own number, whose plans other tests keep too.
BUSY = [0, 512 * 67, 512 * 2039]
LONG_BLOCK = 40  # chunks of a block that many thread blocks share


class Case(NamedTuple):
    spec: FoldSpec
    values: np.ndarray
    members: Any
    options: dict[str, Any]
    busy_threads: int


def case_of(seed: int) -> Case:
    random = np.random.default_rng(seed)

    def pick(choices: Sequence[Any]) -> Any:
        return choices[int(random.integers(len(choices)))]

    how = _reduction(pick, seed)
    dtype, members = pick(REALS), pick([1, 2, 3, 5, 7, 8, 9, 13])
    lengths = [*LENGTHS, 0] if random.random() < 0.1 else LENGTHS
    shape = [pick(lengths) for _ in range(int(random.integers(0, 4)))]
    if random.random() < 0.15:
        shape = [pick([1000, 2048, 4099])]
    while math.prod(shape) > 2500 and len(shape) > 1:
        shape.pop()
    batch = min(int(random.integers(0, 2)), len(shape))
    fields: dict[str, Any] = {
        "gathered": pick([True, True, False]),
        "out_dtype": pick([None, None, *REALS]),
        "divisor": pick([members, None]),
    }
    if how.order == "ring" and how.groups_of is None and shape[batch:] and random.random() < 0.5:
        axis = int(random.integers(len(shape) - batch))
        shape[batch + axis] = members * int(random.integers(1, 6))
        fields["cut_axis"] = axis
    options: dict[str, Any] = {"batch_ndim": batch, "call": pick(range(4))}
    options["batch_offset"] = int(random.integers(0, 2**20))
    if batch and random.random() < 0.4:
        options["batch_offset"] = random.integers(0, 2**40, shape[:1]).astype(np.uint64)
    values = numbers(seed, (members, *shape), dtype)
    spec = dataclasses.replace(fold_spec(how), **fields)
    return Case(spec, values, _arranged(values, pick, random), options, pick(BUSY))


def _reduction(pick: Any, seed: int) -> Reduction:
    order = pick([*ORDERS, *ORDERS, "exact", "fixed", "kahan", "neumaier"])
    at = pick(["hops", "hops", "ends", "members", "result"])
    if at == "hops" and order in ("exact", "fixed", "kahan", "neumaier"):
        at = "ends"
    fmt = pick([*FORMATS, *WIDE, "bfloat16", "float8_e4m3fn", "int8"])
    scale = None if fmt in WIDE else pick([None, "amax", "floor", "ceil", "even"])
    rounding = pick(["nearest", "nearest", "stochastic"])
    wire = Wire(fmt, scale, pick(BLOCKS) if scale else None, rounding, at)
    accumulate, rounding = pick([None, None, *ACCUMULATORS]), pick(["nearest", "stochastic"])
    if order == "fixed":
        accumulate, rounding = pick([None, "int8", "int16", "int32"]), "nearest"
    if order in ("kahan", "neumaier"):
        rounding = "nearest"
    how = Reduction(
        order=order,
        accumulate=accumulate,
        rounding=rounding,
        seed=seed,
        wire=pick([None, *[wire] * 12]),
        divide=pick(["result", "result", "members"]),
    )
    if pick(range(8)):
        return how
    above = pick([None, Wire("bfloat16"), Wire("int8", "amax", pick([4, 32, "row"]))])
    across = Reduction(order=pick(ORDERS[:4]), wire=above, seed=3)
    return dataclasses.replace(how, groups_of=pick([1, 2, 3, 4]), across=across)


def _arranged(values: np.ndarray, pick: Any, random: Any) -> Any:
    """The members as they are, in a list, at odd addresses, or not contiguous."""

    def moved(array: np.ndarray) -> np.ndarray:
        first = int(random.integers(0, 5))
        memory = np.zeros(array.size + 5, array.dtype)[first : first + array.size]
        memory[:] = array.reshape(-1)
        return memory.reshape(array.shape)

    match pick(["stacked", "stacked", "list", "moved", "fortran", "strided", "each moved"]):
        case "list":
            return [np.asarray(member) for member in values]
        case "moved":
            return moved(values)
        case "fortran":
            return np.asfortranarray(values)
        case "strided":
            return np.repeat(values[..., None], 2, -1)[..., 1]
        case "each moved":
            return [moved(np.asarray(member)) for member in values]
    return values


@pytest.mark.parametrize("share", range(4))
def test_random_folds_have_the_bits_of_fallback(
    share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "LONG_BLOCK", LONG_BLOCK)
    for seed in seeds(budget(5000, most=80))[share::4]:
        case = case_of(seed)
        device = HostDevice(case.busy_threads)
        found = device.run_fold(case.spec, case.members, **case.options)
        same(found, run_fold(case.spec, case.values, **case.options))
