"""`gpusim.equal.check`: two functions on simulated ranks, compared in a test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusim.errors import DeadlockError, GpusimError
from gpusim.torch.distributed import launch

from .comparing import Comparison
from .report import record, sentences
from .running import both, whole_trace
from .settings import Settings
from .traces import Trace
from .tracing import traced

__all__ = ["Verdict", "check_functions", "verdict_of"]

DTYPES = {"float64": "float64", "keep": ""}


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    **Attributes**: `equal`; `text`, as `gpusim equal` prints it; `record`, as its --json.
    """

    equal: bool
    text: str
    record: dict[str, Any]


def check_functions(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    ranks: int,
    args: Sequence[Any],
    *,
    reference_ranks: int,
    steps: int,
    dtype: str,
    reduction: Any,
    device: str | None,
) -> Verdict:
    """See `gpusim.equal.check`."""
    if dtype not in DTYPES:
        raise ValueError(f"check: dtype={dtype!r}: expected one of {tuple(DTYPES)}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"check: steps={steps!r}: expected an integer from 0")

    def run(program: tuple[Callable[..., Any], int], settings: Settings) -> Trace:
        function, count = program
        Path(settings.folder).mkdir(parents=True, exist_ok=True)

        def body(rank: int) -> None:
            with traced(settings, rank, count):
                function(rank, *args)

        failure: GpusimError | None = None
        try:
            launch(body, count, reduction=reduction, device=device, processes=True)
        except GpusimError as error:
            failure = error
        deadlock = isinstance(failure, DeadlockError)
        folder = Path(settings.folder)
        trace = whole_trace(folder, failure is not None, deadlock, settings.steps)
        if trace is None:
            raise failure or ValueError("check: the ranks left no trace")
        return trace

    with tempfile.TemporaryDirectory(prefix="gpusim-equal-") as scratch:
        settings = Settings("", steps, DTYPES[dtype])
        programs = (reference, reference_ranks), (candidate, ranks)
        return verdict_of(both(run, *programs, settings, Path(scratch)))


def verdict_of(found: Comparison) -> Verdict:
    """The verdict of a comparison. **Raises**: AssertionError if the programs differ."""
    text = "\n".join(sentences(found))
    if found.failure or not found.compared:
        raise ValueError(text if found.failure else f"nothing was compared\n{text}")
    if not found.equal:
        raise AssertionError(text)
    return Verdict(True, text, record(found))
