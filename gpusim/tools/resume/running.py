"""Runs the script: uninterrupted, up to a checkpoint, and from there, for each pair of sizes.

Runs follow each other, and all have the checkpoint's folder at one place, as scripts write its path
into what they save. A checkpoint is put aside once for each size, and copied for each that loads.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from gpusim.tools import torchrun
from gpusim.tools.equal.running import INTERRUPTED, LAST, FailedError
from gpusim.tools.equal.traces import read
from gpusim.tools.forked import run_in_fork
from gpusim.tools.progress import progress, silent

from .comparing import compare, first_unlike, is_fresh, is_rounding
from .files import saved_steps
from .findings import DIFFERENT, REFUSED, Finding, Pair
from .runs import Run
from .settings import PLACE, Settings

__all__ = ["Plan", "Table", "run_all"]

TERMINATED = 143
WAITS = "no rank can go on"
"""Of a rank that waits for one that was ended at a checkpoint, or after the last step."""


@dataclass(frozen=True)
class Plan:
    """The runs of a plan.

    **Attributes**: `words`, the script and its arguments; `save_words` and `load_words`, those that
    are added for runs that save, and that load; `saves` and `loads`, the numbers of ranks;
    `stop_after`, the step from which on a checkpoint counts; `steps`, after which runs end, 0 for
    none; `options`, of `gpusim torchrun`.
    """

    words: tuple[str, ...]
    save_words: tuple[str, ...]
    load_words: tuple[str, ...]
    saves: tuple[int, ...]
    loads: tuple[int, ...]
    stop_after: int = 1
    steps: int = 0
    limit: int = 4 << 30
    options: tuple[str, ...] = ()


@dataclass
class Table:
    """The verdict of each pair, and what is said of all."""

    plan: Plan
    pairs: list[Pair] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def is_same(self) -> bool:
        return not any(pair.findings or pair.error for pair in self.pairs)


@dataclass(frozen=True)
class Ended:
    """How a run ended: its trace, None of one that has none, its output, and if it failed."""

    run: Run | None
    output: str
    failed: bool


def run_all(
    plan: Plan,
    note: Callable[[str], None] = lambda text: None,
    keep: Path | None = None,
    quiet: bool = False,
) -> Table:
    """Run the script for each pair of sizes, and compare.

    **Raises**: FailedError if the script fails uninterrupted, or never saves or never loads.
    """
    with _folder(keep) as folder:
        sizes = sorted({*plan.saves, *plan.loads})
        total = len(sizes) + len(plan.saves) * (1 + len(plan.loads))
        if quiet:
            return _Runner(plan, folder, note, silent).table(sizes)
        with progress(total) as advance:
            return _Runner(plan, folder, note, advance).table(sizes)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="gpusim-resume-") as scratch:
        yield Path(scratch).absolute()


class _Runner:
    def __init__(
        self,
        plan: Plan,
        folder: Path,
        note: Callable[[str], None],
        advance: Callable[[str, float], None],
    ) -> None:
        self.plan, self.folder, self.note, self.advance = plan, folder, note, advance
        self.place = folder / "checkpoint"
        #: Of each number of ranks, the run up to the checkpoint.
        self.saved: dict[int, Run] = {}

    def table(self, sizes: Sequence[int]) -> Table:
        found = Table(self.plan)
        wholes = {size: self._whole(size) for size in sizes}
        self._say(found, wholes)
        fresh: list[Pair] = []
        for save in self.plan.saves:
            step = self._save(save, wholes[save])
            for load in self.plan.loads:
                pair, is_new = self._load(save, load, step, wholes)
                found.pairs.append(pair)
                fresh += [pair] * is_new
        if len(fresh) == len(found.pairs):
            raise FailedError(
                f"no run read anything from {PLACE}: all began anew. Say by --load-args how the "
                "script resumes"
            )
        return found

    def _say(self, found: Table, wholes: dict[int, Run]) -> None:
        unlike = [
            f"{save} and {load}"
            for save in self.plan.saves
            for load in self.plan.loads
            if save != load and not is_rounding(wholes[save], wholes[load])
        ]
        if unlike:
            found.said.append(
                "uninterrupted runs differ by more than rounding between sizes "
                f"({', '.join(unlike[:4])}{', ...' * (len(unlike) > 4)}), as the global batch or "
                "random numbers depend on the ranks: there only the state at the load and the data "
                "are compared"
            )
        if any(run.left_out for run in wholes.values()):
            found.said.append("--trace-limit left no room for some tensors: they are not compared")

    def _whole(self, ranks: int) -> Run:
        self._clean()
        name = f"whole-{ranks}"
        ended = self._run(name, ranks, self.plan.save_words, steps=self.plan.steps)
        if ended.run is None or (ended.failed and WAITS not in ended.output):
            raise FailedError(f"the script failed on {_ranks(ranks)}:\n{_end(ended.output)}")
        if not ended.run.steps:
            raise FailedError(
                f"the script made no step of a torch optimizer on {_ranks(ranks)}:\n"
                f"{_end(ended.output)}"
            )
        return ended.run

    def _save(self, ranks: int, whole: Run) -> int:
        """Run to a checkpoint, and put it aside; the steps that are done at it."""
        self._clean()
        name = f"save-{ranks}"
        ended = self._run(name, ranks, self.plan.save_words, stops=True)
        if ended.run is None or (ended.failed and WAITS not in ended.output):
            raise FailedError(f"the script failed on {_ranks(ranks)}:\n{_end(ended.output)}")
        all_steps = saved_steps(self.folder / name)
        steps = [step for step in all_steps if step >= self.plan.stop_after]
        if not steps:
            where = f"; only after step {all_steps[-1]}" if all_steps else ""
            raise FailedError(
                f"the script saved nothing to {PLACE} from step {self.plan.stop_after} on, on "
                f"{_ranks(ranks)}{where}"
            )
        step = steps[0]
        if step >= whole.steps:
            raise FailedError(
                f"the only checkpoint on {_ranks(ranks)} is the last: no step follows step {step}. "
                "Let the script save earlier, or train for longer"
            )
        unlike = first_unlike(whole, ended.run, min(step, ended.run.steps))
        if unlike is not None:
            raise FailedError(
                f"two uninterrupted runs on {_ranks(ranks)} differ: {unlike}. Nothing can be "
                "compared with a script whose runs differ; does it use a time or an unseeded "
                "generator?"
            )
        self.saved[ranks] = ended.run
        shutil.rmtree(self.folder / f"saved-{ranks}", ignore_errors=True)
        self.place.rename(self.folder / f"saved-{ranks}")
        return step

    def _load(self, save: int, load: int, step: int, wholes: dict[int, Run]) -> tuple[Pair, bool]:
        """Resume; the verdict, and whether the run began anew without reading anything."""
        self._clean()
        self.place.rmdir()
        shutil.copytree(self.folder / f"saved-{save}", self.place, symlinks=True)
        name = f"load-{save}-{load}"
        steps = max(self.plan.steps - step, 1) if self.plan.steps else 0
        ended = self._run(name, load, self.plan.load_words, steps=steps)
        if ended.run is None or (ended.failed and not (steps and WAITS in ended.output)):
            error = _error(ended.output).replace(str(self.place), PLACE)
            return Pair(save, load, step, REFUSED, (), error), False
        resumed = ended.run
        exact = "--reduction" not in self.plan.options
        pair = compare(wholes[save], wholes[load], resumed, step, exact, self.saved[save])
        is_new = not any(end.get("loaded") for end in resumed.ends)
        is_new = is_new and is_fresh(wholes[load], resumed, wholes[save], step)
        if is_new:
            text = f"the run begins anew: it reads nothing from {PLACE}"
            finding = Finding("weights", "all weights", text, None, step)
            pair = Pair(save, load, step, DIFFERENT, (finding, *pair.findings))
        return pair, is_new

    def _clean(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir(parents=True)

    def _run(
        self, name: str, ranks: int, more: Sequence[str], stops: bool = False, steps: int = 0
    ) -> Ended:
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        settings = Settings(
            str(folder), str(self.place), stops, self.plan.stop_after, steps, self.plan.limit
        )
        script = [word.replace(PLACE, str(self.place)) for word in (*self.plan.words, *more)]
        words = ["--quiet", "--processes", "--ranks", str(ranks), *self.plan.options]
        words += ["--traced", json.dumps(asdict(settings)), *script]
        self.note(f"{name.replace('-', ' ')}: on {_ranks(ranks)}")
        output = folder / "output"
        code = run_in_fork(partial(torchrun.run, torchrun.options_of(words)), output)
        if code in (INTERRUPTED, TERMINATED):
            raise KeyboardInterrupt
        self.advance(name.replace("-", " "), 1)
        said = output.read_text(errors="replace")
        try:
            trace = read(folder)
        except (ValueError, OSError):
            return Ended(None, said, True)
        return Ended(Run(trace), said, bool(code))


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _end(output: str) -> str:
    return "\n".join(output.splitlines()[-LAST:])


def _error(output: str) -> str:
    """The last error of a rank's, from the output of a run that failed.

    >>> _error("[rank1]:   File ...\\n[rank1]: KeyError: 'dp_rank_3'\\ngpusim torchrun: rank 1")
    "KeyError: 'dp_rank_3'"
    """
    lines = output.splitlines()
    found = [
        match[1]
        for line in lines
        if (match := re.match(r"\[rank\d+\]: ([\w.]+(?:Error|Exception|Exit|Interrupt)\b.*)", line))
    ]
    if found:
        return found[-1]
    own = [line.partition(": ")[2] for line in lines if line.startswith("gpusim torchrun:")]
    return own[-1] if own else (lines[-1] if lines else "it ended without a word")
