"""Runs `gpusim torchrun --check` on every planted program, with its fault and without.

python -m tests.check [--only TEXT] [--faults | --fixed] [--dry]
python -m tests.check --page
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.check import figures, page
from tests.check.cases import Case, cases, run

__all__ = ["main"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--faults", action="store_true", help="without the corrected programs")
    parser.add_argument("--fixed", action="store_true", help="the corrected programs alone")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what is said")
    parser.add_argument("--page", action="store_true", help="write the kinds into docs/check.md")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    options = parser.parse_args()
    if options.page:
        page.write()
        return 0
    rows = []
    for case in cases(options.only):
        row = {"program": case.path.stem, "kind": case.kind, "verdict": "", "fixed": ""}
        rows.append(row)
        if not options.fixed:
            said = run(case.options, case.path)
            row["verdict"] = case.found(said.findings)
            others = [each["kind"] for each in said.findings if each["kind"] != case.kind]
            show(case, row["verdict"], f"also {', '.join(others)}" if others else "")
            if options.verbose or row["verdict"] != "named":
                print(said.output[-2500:])
        if not options.faults:
            said = run(case.options, case.path, "--fixed")
            silent = not said.findings and not said.code
            row["fixed"] = "silent" if silent else "ALARM" if said.findings else "failed"
            if not silent:
                show(case, row["fixed"], "--fixed")
                print(said.output[-2500:])
    for kind in sorted({row["kind"] for row in rows}):
        own = [row for row in rows if row["kind"] == kind]
        print(f"{kind:24} {sum(row['verdict'] == 'named' for row in own)} of {len(own)}")
    verdicts = Counter(row[name] for row in rows for name in ("verdict", "fixed") if row[name])
    print(dict(verdicts))
    if not (options.fixed or options.faults or options.only or options.dry):
        figures.write("planted", rows)
    return int(bool({*verdicts} - {"named", "silent"}))


def show(case: Case, verdict: str, more: str) -> None:
    print(f"{verdict:8} {case.path.name} {more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
