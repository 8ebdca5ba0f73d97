"""Runs both programs with tracers: the candidate first, as the reference follows what it read."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gpusim.tools import torchrun
from gpusim.tools.forked import run_in_fork
from gpusim.tools.progress import waiting

from .comparing import Comparison, compare
from .settings import Program, Settings
from .traces import Trace, read

__all__ = ["FailedError", "both", "run_both"]

INTERRUPTED = 130
LAST = 40
"""Lines of a failed program's output that are shown."""
BY_SEED = 0.5
"""The share of a rank's weights that are the reference's, from which on the others are wrong."""


class FailedError(ValueError):
    """A program failed, or there is nothing to compare."""


def run_both(
    reference: Program,
    candidate: Program,
    settings: Settings,
    note: Callable[[str], None] = lambda text: None,
    keep: Path | None = None,
    quiet: bool = False,
) -> Comparison:
    """Run both, and compare their traces; `quiet` without progress.

    **Raises**: FailedError if a program fails, with the end of its output.
    """
    with _folder(keep) as folder:
        runner = partial(run, note=note, quiet=quiet)
        return both(runner, reference, candidate, settings, folder)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="gpusim-equal-") as scratch:
        yield Path(scratch)


Runner = Callable[[Any, Settings], Trace]


def both(
    run: Runner, reference: Any, candidate: Any, settings: Settings, folder: Path
) -> Comparison:
    """Run both by a function, and compare; again with written weights if theirs do not agree."""
    settings, theirs = _run_candidate(run, candidate, settings, folder)
    said = []
    batches = merged([own.end.get("batches") or [] for own in theirs.by_rank])
    given = replace(settings, folder=str(folder / "reference"))
    if batches is not None:
        lengths = theirs.by_rank[0].end.get("lengths") or []
        (folder / "batches.json").write_text(json.dumps({"batches": batches, "lengths": lengths}))
        given = replace(given, batches=str(folder / "batches.json"))
        said.append(
            "data: the reference's DataLoaders read the batches of all ranks, one behind the other"
        )
    mine = run(reference, given)
    if given.dtype == "float64" and _is_narrow(mine):
        settings = replace(settings, dtype="wide")
        return _again(run, reference, candidate, settings, folder, said)
    noise, changing = None, set[str]()
    if not given.dtype:
        noise = run(reference, replace(given, folder=str(folder / "noise"), noise=True))
        said.append(
            "rounding: differences up to 8 times those of the reference with each output changed "
            "by a rounding"
        )
    found = compare(mine, theirs, noise)
    if found.first is not None and found.first.kind == "logged":
        # A time, or what else is another one each run: the reference says.
        changing = _changing(mine, run(reference, replace(given, folder=str(folder / "again"))))
        found = compare(mine, theirs, noise, changing) if changing else found
    weights = _weights_to_write(found)
    if weights:
        np.savez(folder / "weights.npz", **weights)
        given = replace(
            given, weights=str(folder / "weights.npz"), folder=str(folder / "reference-again")
        )
        mine = run(reference, given)
        if noise is not None:
            noise = run(reference, replace(given, folder=str(folder / "noise"), noise=True))
        found = compare(mine, theirs, noise, changing)
        said.append(
            f"weights: {len(weights)} of the reference's are the candidate's, put together by "
            "their shapes; they did not agree by seed"
        )
    else:
        said.append("weights: as the programs made them, by seed or checkpoint")
    found.said = said + found.said
    return found


def _run_candidate(
    run: Runner, candidate: Any, settings: Settings, folder: Path
) -> tuple[Settings, Trace]:
    return settings, run(candidate, replace(settings, folder=str(folder / "candidate")))


def _again(
    run: Runner,
    reference: Any,
    candidate: Any,
    settings: Settings,
    folder: Path,
    said: Sequence[str],
) -> Comparison:
    """Once more with every narrow dtype wide, as the reference itself computes in one."""
    wide = folder / "wide"
    wide.mkdir(exist_ok=True)
    found = both(run, reference, candidate, settings, wide)
    found.said.insert(
        0, "dtypes: bfloat16 and float16 are float64 too, as the programs compute in them"
    )
    return found


def _is_narrow(trace: Trace) -> bool:
    """Whether the reference itself computes in 16 bits."""
    narrow: dict[str, str] = {}
    for own in trace.ends("narrow"):
        narrow |= own or {}
    return any(name in narrow for name in ("bfloat16", "float16"))


def _changing(one: Trace, other: Trace) -> set[str]:
    """The logs of one program that differ between two runs of it."""
    found = set()
    for mine, theirs in zip(one.by_rank, other.by_rank, strict=True):
        logs = [[each for each in own.events if each.kind == "logged"] for own in (mine, theirs)]
        for a, b in zip(*logs, strict=False):
            if a.name != b.name or not np.array_equal(a.array, b.array, equal_nan=True):
                found |= {a.name, b.name}
    return found


def _weights_to_write(found: Comparison) -> dict[str, Any]:
    """The weights for the reference where the two programs draw their own; none if they agree.

    By seed, if at least half of what a rank holds is the reference's: the rest is wrong then, and
    is not written over.
    """
    first = [
        item
        for item in found.compared
        if item.kind == "weight" and item.step == 0 and not _constant(item)
    ]
    if not first:
        return {}
    agree: dict[int, list[bool]] = {}
    for item in first:
        for rank in item.ranks:
            agree.setdefault(rank, []).append(item.related)
    apart = {rank for rank, own in agree.items() if sum(own) < BY_SEED * len(own) and not all(own)}
    if not apart:
        return {}
    written = {}
    for item in first:
        if item.related or not set(item.ranks) & apart:
            continue
        whole = by_shape(item, found)
        if whole is not None:
            written[f"{item.root}/{item.name}"] = whole
    return written


def _constant(item: Any) -> bool:
    whole = item.whole()
    whole = whole[0] if isinstance(whole, list) else whole
    return bool((whole == whole.reshape(-1)[0]).all()) if whole.size else True


def by_shape(item: Any, found: Comparison) -> Any:
    """The candidate's parts put together to the shape of the reference's weight; None if not."""
    from .relations import Step, put_together

    whole = item.whole()
    shape = (whole[0] if isinstance(whole, list) else whole).shape
    parts = item.parts()
    first = next(iter(parts.values()))
    if first.shape == shape:
        return first
    for mesh in found.meshes:
        groups = tuple(
            own for group in mesh if (own := tuple(rank for rank in group if rank in parts))
        )
        for dim in range(len(shape)):
            joined = put_together(parts, Step("S", groups, dim))
            for each in (joined or {}).values():
                if each.shape == shape:
                    return each
    return None


def run(program: Program, settings: Settings, note: Callable[[str], None], quiet: bool) -> Trace:
    """Run a program by `gpusim torchrun`, and read its trace.

    **Raises**: FailedError if it fails.
    """
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank-*"):  # of --traces, by another number of ranks
        old.unlink()
    words = ["--quiet", "--processes", "--ranks", str(program.ranks), *program.options]
    words += ["--traced", json.dumps(asdict(settings)), *program.words]
    note(f"running {program}")
    output = folder / "output"
    with nullcontext() if quiet else waiting(f"running {program}"):
        code = run_in_fork(partial(torchrun.run, torchrun.options_of(words)), output)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    # A rank ends as its first forward pass after the last step begins. One that has to wait for
    # it before, as a later stage of a pipeline, is ended as nothing can come any more.
    said = output.read_text(errors="replace")
    trace = whole_trace(folder, bool(code), "no rank can go on" in said, settings.steps)
    if trace is None:
        shown = "\n".join(said.splitlines()[-LAST:])
        raise FailedError(f"{program} failed:\n{shown}")
    if not any(own.events for own in trace.by_rank):
        if any(own.end.get("left_out") for own in trace.by_rank):
            raise FailedError(f"{program}: --trace-limit leaves room for no tensor")
        raise FailedError(f"{program}: no module of torch's was called, so nothing can be compared")
    return trace


def whole_trace(folder: Path, failed: bool, deadlock: bool, steps: int) -> Trace | None:
    """The trace of a program; None if it failed, but as a rank waits for one that was ended."""
    try:
        trace = read(folder)
    except (ValueError, OSError):
        return None
    made = [own.end.get("steps") or 0 for own in trace.by_rank]
    return None if failed and not (deadlock and steps and max(made) >= steps) else trace


def merged(ranks: list[list[list[Any]]]) -> list[list[Any]] | None:
    """The batches that the reference reads, from those of all ranks; None if all read the same.

    **Arguments**: `ranks`: of each rank, of each iterator, the indices of its batches.

    >>> merged([[[[0, 1], [4, 5]]], [[[2, 3], [6, 7]]]])
    [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    >>> merged([[[[0, 1]]], [[[0, 1]]]]) is None
    True
    """
    if not ranks or all(each == ranks[0] for each in ranks):
        return None
    found = []
    for iterators in zip(*ranks, strict=False):
        distinct: list[list[Any]] = []
        for batches in iterators:
            if batches not in distinct:
                distinct.append(batches)
        steps = []
        for parts in zip(*distinct, strict=False):
            whole: list[Any] = []
            for part in parts:
                whole += part if isinstance(part, list) else [part]
            steps.append(whole)
        found.append(steps)
    return found
