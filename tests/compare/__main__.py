"""Runs `gpusim compare` on planted pairs of runs, and judges what it says.

python -m tests.compare [--only TEXT] [--name NAME] [--kind real|simulated] [-v] [--json FILE]
    [--pairs MODULE] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gpusim.tools.progress import progress
from tests.compare import making
from tests.compare.measuring import Measured, Workshop
from tests.compare.pair import Pair

__all__ = ["main", "summary"]

SHARE = 0.9
"""The least share of pairs whose class has to be right."""


def shown(pair: Pair, measured: Measured, verbose: bool) -> str:
    """A row of the table, and what is wrong below it."""
    judged = measured.judged
    cause = f"{judged.cause} {judged.certainty}" if judged else ""
    place = judged.place if judged else ""
    name = f"{pair.program.removesuffix('.py')}: {pair.name}"
    lines = [
        f"{measured.word:9} {measured.seconds:5.1f} s  {name:44} {pair.a} / {pair.b}: {cause}"
        f"  {place}"
    ]
    if judged is not None:
        if not judged.right:
            lines.append(f"    expected {' or '.join(pair.classes) or 'equal'}")
        lines += [f"    {each}" for each in (*judged.false, *judged.mismatches, *judged.missing)]
    if measured.error:
        lines.append(f"    {measured.error[-1500:]}")
    if verbose or (judged is not None and judged.word != "right"):
        text = measured.text.partition("\nCalls of a")[0]
        lines += [f"    | {line}" for line in text.strip().splitlines()]
    return "\n".join(lines)


def summary(pairs: Sequence[Pair], rows: Sequence[Measured]) -> str:
    """The counts, in sentences."""
    words = Counter(row.word for row in rows)
    real = [row for pair, row in zip(pairs, rows, strict=True) if pair.real]
    proven = [row.judged for row in rows if row.judged and row.judged.certainty == "proven"]
    right = sum(row.judged is not None and row.judged.right for row in rows)
    mismatches = sum(bool(row.judged and row.judged.mismatches) for row in rows)
    return (
        f"{len(rows)} pairs, {len(real)} with real processes: {words['FALSE']} false places, "
        f"{right} right classes ({sum(row.word == 'right' for row in real)} of the real ones); "
        f"{len(proven)} proven causes, {sum(judged.right for judged in proven)} right; "
        f"{mismatches} mismatches of text and JSON; {words['failed']} failed."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="pairs whose name or program contains this")
    parser.add_argument("--name", help="the pair of this name alone")
    parser.add_argument("--kind", choices=("real", "simulated"))
    parser.add_argument("--pairs", default="tests.compare.pairs", help="a module with PAIRS")
    parser.add_argument("--json", type=Path, help="write the outcomes into this file")
    parser.add_argument("--keep", type=Path, help="a folder that keeps programs and records")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what is said")
    options = parser.parse_args()
    pairs: list[Pair] = [
        pair for pair in importlib.import_module(options.pairs).PAIRS
        if options.only in f"{pair.program} {pair.name}"
        and options.kind in (None, "real" if pair.real else "simulated")
        and options.name in (None, pair.name)
    ]  # fmt: skip
    making.import_once()
    rows: list[Measured] = []
    with tempfile.TemporaryDirectory() as scratch, progress(len(pairs)) as advance:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        workshop = Workshop(folder)
        for pair in pairs:
            rows.append(workshop.measure(pair))
            advance(pair.name, 1)
            print(shown(pair, rows[-1], options.verbose), flush=True)
            if options.json:
                options.json.write_text(json.dumps([row.plain() for row in rows], indent=1) + "\n")
    print(summary(pairs, rows))
    right = sum(row.judged is not None and row.judged.right for row in rows)
    bad = any(row.word in ("FALSE", "mismatch", "failed") for row in rows)
    return int(bad or right < SHARE * len(rows))


if __name__ == "__main__":
    sys.exit(main())
