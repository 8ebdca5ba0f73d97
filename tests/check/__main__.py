"""Runs `gpusim torchrun --check` on every planted program, with its fault and without.

python -m tests.check [--only TEXT] [--faults | --fixed]
python -m tests.check --page
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.check import page
from tests.check.cases import Case, cases, run

__all__ = ["main"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--faults", action="store_true", help="without the corrected programs")
    parser.add_argument("--fixed", action="store_true", help="the corrected programs alone")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what is said")
    parser.add_argument("--page", action="store_true", help="write the kinds into docs/check.md")
    options = parser.parse_args()
    if options.page:
        page.write()
        return 0
    verdicts: Counter[str] = Counter()
    by_kind: dict[str, Counter[str]] = {}
    for case in cases(options.only):
        if not options.fixed:
            said = run(case.options, case.path)
            verdict = case.found(said.findings)
            others = [each["kind"] for each in said.findings if each["kind"] != case.kind]
            verdicts[verdict] += 1
            by_kind.setdefault(case.kind, Counter())[verdict] += 1
            show(case, verdict, f"also {', '.join(others)}" if others else "")
            if options.verbose or verdict != "named":
                print(said.output[-2500:])
        if not options.faults:
            said = run([*case.options], case.path, "--fixed")
            silent = not said.findings and not said.code
            verdict = "silent" if silent else "ALARM" if said.findings else "failed"
            verdicts[verdict] += 1
            if not silent:
                show(case, verdict, "--fixed")
                print(said.output[-2500:])
    for kind, own in sorted(by_kind.items()):
        print(f"{kind:24} {own['named']} of {own.total()}")
    print(dict(verdicts))
    return int(bool({*verdicts} - {"named", "silent"}))


def show(case: Case, verdict: str, more: str) -> None:
    print(f"{verdict:8} {case.path.name} {more}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
