"""The figures of docs/check.md: what is found, and that right programs are silent."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .cases import ROOT
from .page import PAGE

__all__ = ["RESULTS", "write"]

RESULTS = ROOT / "bench" / "results" / "check.json"
BEGIN, END = "<!-- python -m tests.check -->\n", "<!-- end -->"


def write(part: str, rows: Sequence[dict[str, Any]], name: str = "program") -> None:
    """Put rows into the results, in place of those of the same names, and the table of the page."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = {row[name] for row in rows}
    results[part] = [*(row for row in results.get(part, []) if row[name] not in names), *rows]
    results[part].sort(key=lambda row: row[name])
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = PAGE.read_text()
    start = text.index(BEGIN) + len(BEGIN)
    end = text.index(END, start)
    PAGE.write_text(text[:start] + "\n" + shown(results) + "\n" + text[end:])


def shown(results: dict[str, list[dict[str, Any]]]) -> str:
    """The figures as the page has them."""
    parts = []
    planted = results.get("planted", [])
    if planted:
        found = sum(row["verdict"] == "named" for row in planted)
        silent = sum(row["fixed"] == "silent" for row in planted)
        public = sum("public" in row["program"] for row in planted)
        parts.append(
            f"Planted programs, five for each kind and {public} after public reports, written by "
            f"others than the check:\n{found} of {len(planted)} are named with file, line and "
            f"ranks; {silent} of {len(planted)} are silent without their fault.\n\n"
            "| kind | named | silent without the fault |\n|---|---|---|\n" + _by_kind(planted)
        )
    right = results.get("right", [])
    if right:
        clean = sum(not row["findings"] and not row["differs"] for row in right)
        both = [sum(row[name] for row in right) for name in ("seconds", "seconds_checked")]
        ratios = sorted(row["seconds_checked"] / row["seconds"] for row in right)
        parts.append(
            f"Right programs, the examples and those of [frameworks](frameworks.md): {clean} of "
            f"{len(right)} without a finding, and with the\nsame results as without the check. "
            f"All together take {both[1] / both[0]:.2f} of the time, the median is "
            f"{ratios[len(ratios) // 2]:.2f}, the\nslowest {ratios[-1]:.2f} (whole commands, two "
            "cores). A step of a program with CUDA streams of its own takes 1.4 to 3 times as\n"
            "long: each operator is followed."
        )
    return "\n\n".join(parts) + "\n"


def _by_kind(planted: Sequence[dict[str, Any]]) -> str:
    lines = []
    for kind in dict.fromkeys(sorted(row["kind"] for row in planted)):
        own = [row for row in planted if row["kind"] == kind]
        named = sum(row["verdict"] == "named" for row in own)
        silent = sum(row["fixed"] == "silent" for row in own)
        lines.append(f"| `{kind}` | {named} of {len(own)} | {silent} of {len(own)} |")
    return "\n".join(lines)
