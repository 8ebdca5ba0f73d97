"""The sweep: every setting, number of replicas and seed, over windows of the elements.

Its memory depends neither on the number of elements nor on the number of settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from os import PathLike
from pathlib import Path

from numpy.typing import DTypeLike

from gpusim.formats import FormatLike
from gpusim.reduction import ReductionLike
from gpusim.tools.info import usable_cores
from gpusim.tools.progress import Advance, progress, silent
from gpusim.tools.study.arrays import GRADIENTS
from gpusim.tools.study.command_line import command
from gpusim.tools.study.metrics import merged
from gpusim.tools.study.planning import SEEDS, Sweep, plan
from gpusim.tools.study.results import Measurement, Study
from gpusim.tools.study.rows import CONFIDENCE
from gpusim.tools.study.settings import Setting, carrier
from gpusim.tools.study.sources import Input
from gpusim.tools.study.store import Store
from gpusim.tools.study.traffic import Traffic, traffic_of
from gpusim.tools.study.windows import Window
from gpusim.wires import Wire

__all__ = ["ArtefactWarning", "Sweep", "artefacts", "plan", "run", "sweep"]


class ArtefactWarning(UserWarning):
    """Some figures of a sweep are those of short messages, not of the wire that is named."""


def sweep(
    input: Input = GRADIENTS,
    *,
    replicas: Iterable[int] | int | str | None = None,
    dtypes: Iterable[DTypeLike | FormatLike] | DTypeLike | FormatLike = ("float16",),
    accumulators: Iterable[DTypeLike | FormatLike | None] | DTypeLike | FormatLike | None = None,
    orders: Iterable[str] | str | None = None,
    roundings: Iterable[str] | str | None = None,
    ops: Iterable[str] | str = ("sum",),
    preset: str = "orders",
    seeds: Iterable[int] | int | str = SEEDS,
    elements: int | None = None,
    scale: float | None = None,
    input_seed: Iterable[int] | int | str = 0,
    epoch: int = 5,
    tensor: str | None = None,
    wires: Iterable[Wire | DTypeLike | None] | Wire | DTypeLike | None = None,
    hierarchies: Iterable[int | str | None] | int | str | None = None,
    reductions: Iterable[ReductionLike] | ReductionLike | None = None,
    concatenate: bool = False,
    resample: str | None = None,
    error_feedback: int | None = None,
    confidence: float = CONFIDENCE,
    compare: Iterable[tuple[str, str]] = (),
    compare_metric: str = "relative_error",
    store: str | PathLike[str] | None = None,
    resume: bool = False,
    threads: int | None = None,
    show: bool = False,
) -> Study:
    """Sum an input's replicas in every combination of settings, and measure the errors.

    Values are rounded to `dtype`, to nearest, and summed over the first R replicas; errors are
    those of the sum, against the exact sum of the rounded values. `input_error` alone is against
    the exact sum of the values before they were rounded.

    Each list may also be a single item, or a string with items between commas, as on the command
    line: `dtypes="bfloat16,e5m6"`, `replicas="2..64"`.

    **Arguments**:

    - `input`: "gradients" (of the digits network, an image each), "normal", "lognormal",
      "heavy-tailed" (Student's t with two degrees of freedom), "cancelling"; a file (.npy, .npz,
      .safetensors, .pt) or an array, whose axis 0 numbers the replicas; a pattern of files, one
      from each worker ("rank*.safetensors"); a list with an array, or a dict of arrays, from each
      worker; a dict of arrays; or a DataFrame with a row for each replica. Tensors are arrays. Raw
      bytes, as NumPy stores bfloat16 and the 8-bit formats, have the type that `dtypes` names.
      Infinite values are allowed and reported, NaNs are not.
    - `replicas`: the numbers of replicas; the powers of two from 2 to 1,024 that the input has,
      and for which integers have room.
    - `dtypes`: the formats of the values: dtypes, a `gpusim.Format` ("e5m6" is Format(5, 6)).
    - `accumulators`: the formats partial sums are rounded to: "wire", that in which they travel
      (the dtype of the values, or what a twin's engine uses); "contract" or [None], the default of
      Reduction (float32 for bfloat16); dtypes and Formats. None is the preset's. For the order
      "fixed", and for it alone, "int8", "int16" and "int32", which is also "wire".
    - `orders`: of "linear", "reverse", "tree", "ring", "kahan", "neumaier", "exact" and "fixed",
      and names of twins; None: the preset's.
    - `roundings`: of "nearest" and "stochastic"; None: the preset's.
    - `ops`: of "sum" and "mean".
    - `preset`: what the three lists are where they are None: "orders" (linear, ring and tree, in
      both roundings), "engines" (twins that add the dtype, rounded to nearest) or "accumulators"
      (ring and tree with partial sums in the dtype and in float32). All use "wire".
    - `seeds`: of stochastic rounding.
    - `elements`: how many elements are summed; 4,096 of a distribution, else all there are.
    - `scale`: what values are multiplied by before they are rounded; 128 for "gradients", else 1.
    - `input_seed`: seeds distributions, the digits network, and `resample`. Several are several
      inputs: figures are means over them, with intervals.
    - `epoch`: how many epochs the digits network is trained before its gradients are taken.
    - `tensor`: the name of the array, in a file that holds several, or a pattern such as "*" or
      "layer.*": each array that matches is reduced alone and has rows of its own.
    - `wires`: what is sent is rounded to them: None or "none"; a `gpusim.Wire`; a format; or a text
      such as "int8:amax:64@ends" (format, scale, block, at) or "mx:float8_e4m3fn". They round as
      `roundings` says. With wires, hierarchies or the order "fixed" values are folded whole, up to
      1 GiB over all replicas.
    - `hierarchies`: None or "none"; the replicas of a group, 8; or with the order across the
      groups, "8:tree". Else that is the order in the groups.
    - `reductions`: whole Reductions instead of these settings, as `gpusim.as_reduction` takes them:
      "tree accumulate=float32". Where they draw, `seeds` replace theirs. They fold values whole.
    - `concatenate`: the arrays of a file or dict are one value, one after the other, as a bucket
      is.
    - `resample`: draw replicas from recorded workers, with replacement, for any number of them:
      "workers" takes all values of a worker, "elements" draws each element's worker alone.
    - `error_feedback`: a number of steps, whose sums are accumulated exactly. Settings with a wire
      at "ends" or "members" are measured with and without residuals that replicas keep.
    - `confidence`: of the intervals of the mean over inputs, or over seeds of one input.
    - `compare`: pairs of settings, by name or text, that `show`, `to_json` and `report` test as
      `Study.tests` does, on `compare_metric`.
    - `store`: a file that keeps every measurement as soon as it is made. If the input cannot be
      measured, a store that this call made is removed.
    - `resume`: go on with what `store` holds; it may have been swept with other settings.
    - `threads`: how many fold at a time; as many as there are cores.
    - `show`: show progress on standard error.

    **Returns**: The study, with rows and ways to print, draw and write them.

    **Raises**:

    - ValueError: an argument, or an input file, that makes no sense; an input with NaNs.
    - TypeError: a twin in `orders` whose engine does not add the dtype.
    - OSError: a file that cannot be read or written; FileExistsError for a `store` that holds a
      sweep, without `resume`.
    - ModuleNotFoundError: a package is needed that the extra `study` brings, or PyTorch.

    **Warns**: ArtefactWarning, once, where messages are shorter than a wire's blocks, or a wire
    sends more bytes than unrounded values. `row.problems` says which rows these are.

    >>> study = sweep("normal", dtypes="bfloat16", replicas=64, preset="engines")
    >>> for row in study.rows:
    ...     print(f"{row.setting.name:40} {row.mean.relative_error:.1e} {row.mean.correct:.0%}")
    bfloat16 added in float32, xla-cpu       1.7e-03 100%
    bfloat16 added in float32, mpich         1.7e-03 100%
    bfloat16 added in float32, openmpi-ring  1.7e-03 100%
    bfloat16 added in bfloat16, gloo-ring    9.3e-03 20%
    bfloat16 added in bfloat16, nccl-ring    9.8e-03 20%
    bfloat16 added in bfloat16, nccl-tree    9.5e-03 19%
    """
    planned = plan(
        input,
        replicas=replicas,
        dtypes=dtypes,
        accumulators=accumulators,
        orders=orders,
        roundings=roundings,
        ops=ops,
        preset=preset,
        seeds=seeds,
        elements=elements,
        scale=scale,
        input_seed=input_seed,
        epoch=epoch,
        tensor=tensor,
        wires=wires,
        hierarchies=hierarchies,
        reductions=reductions,
        concatenate=concatenate,
        resample=resample,
        error_feedback=error_feedback,
        confidence=confidence,
        compare=compare,
        compare_metric=compare_metric,
    )
    path = None if store is None else Path(store)
    begun = command(planned.arguments)
    with Store(planned.identity, path, resume=resume, command=begun) as kept:
        found = run(planned, kept, threads=threads, show=show)
    if found.problems:
        warnings.warn(artefacts(found), ArtefactWarning, stacklevel=2)
    return found


def artefacts(study: Study) -> str:
    """A sentence about all rows of a study that are artefacts."""
    rows = [row for row in study.rows if row.problems]
    one = max(rows, key=lambda row: (len(row.problems), row.replicas))
    return (
        f"{len(rows)} of {len(study.rows)} rows are artefacts of short messages (row.problems, "
        f"marked in tables and pictures), such as {one.setting.name} at {one.replicas:,} replicas: "
        + ", and ".join(one.problems)
    )


def run(planned: Sweep, store: Store, *, threads: int | None = None, show: bool = False) -> Study:
    """Measure the windows that `store` lacks, and combine all of them.

    **Raises**: ValueError for an input that cannot be measured; a new store is then removed.
    """
    total, done = planned.work(store)
    workers = threads or usable_cores()
    bar: AbstractContextManager[Advance] = progress(total, done) if show else nullcontext(silent)
    formats = dict.fromkeys(setting.dtype for setting in planned.settings)
    try:
        with bar as advance, ThreadPoolExecutor(workers) as pool:
            for replicas, number, tensor, dtype in product(
                planned.replicas, planned.inputs, planned.sources, formats
            ):
                source = planned.inputs[number][tensor]
                for place in planned.windows(tensor, replicas, carrier(dtype)):
                    window = Window(
                        source,
                        source.elements,
                        planned.scale,
                        replicas,
                        dtype,
                        *place,
                        planned.steps,
                    )
                    points = planned.points_of(number, tensor, dtype, replicas, place)
                    window.measure(points, store, pool, advance)
    except ValueError:
        store.discard()
        raise
    return Study(planned.title, planned.about, _gathered(planned, store))


def _gathered(planned: Sweep, store: Store) -> list[Measurement]:
    """The figures of each reduction; of several arrays first those of all together."""
    found = []
    several = list(planned.sources) if None not in planned.sources else []
    traffic: dict[tuple[Setting, int], dict[str | None, Traffic]] = {}
    for number, setting, replicas, seed in planned.reductions():
        parts = {
            tensor: [
                store.get(point)
                for point in planned.points(number, tensor, setting, replicas, seed)
            ]
            for tensor in planned.sources
        }
        sent = traffic.get((setting, replicas))
        if sent is None:
            sent = traffic[setting, replicas] = _traffic(planned, setting, replicas)
        whole = [part for found_parts in parts.values() for part in found_parts]
        for tensor, some in [(None, whole), *((name, parts[name]) for name in several)]:
            metrics = merged([part for part in some if part is not None])
            found.append(
                Measurement(setting, replicas, seed, metrics, tensor, sent[tensor], number)
            )
    return found


def _traffic(planned: Sweep, setting: Setting, replicas: int) -> dict[str | None, Traffic]:
    """The traffic of each array, and of all."""
    each: dict[str | None, Traffic] = {
        tensor: traffic_of(setting.reduction(0), replicas, source.elements, setting.dtype)
        for tensor, source in planned.sources.items()
    }
    short = min(
        ((t.shortest, t.block) for t in each.values() if t.shortest is not None),
        default=(None, None),
    )
    sent = sum(traffic.bytes_sent for traffic in each.values())
    unrounded = sum(traffic.unrounded for traffic in each.values())
    return {**each, None: Traffic(sent, unrounded, short[1], short[0])}
