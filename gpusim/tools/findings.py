"""Findings of a check, as every command that has --check shows and writes them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpusim.files import atomic_write
from gpusim.tools.options import STDOUT, check_target

__all__ = ["add_check_report", "check_report_target", "show_findings", "write_report"]


def add_check_report(parser: Any) -> None:
    """Add --check-report."""
    parser.add_argument(
        "--check-report",
        type=Path,
        metavar="FILE",
        help="write the findings of the check as JSON to a FILE, '-' for standard output",
    )


def check_report_target(options: argparse.Namespace) -> None:
    """**Raises**: UsageError if the report could not be written later."""
    if options.check_report not in (None, STDOUT):
        check_target("--check-report", options.check_report)


def show_findings(options: argparse.Namespace, findings: Sequence[Any], text: str) -> int:
    """Show findings, each a `Finding`, and write the report; the exit code.

    `text` is for people. With --quiet it is shown only if there are findings.
    """
    if findings or not options.quiet:
        print(f"gpusim {options.command}: {text}", file=sys.stderr)
    write_report(options.check_report, [each.as_json() for each in findings])
    return 1 if findings else 0


def write_report(report: Path | None, rows: Sequence[dict[str, Any]]) -> None:
    """Write findings to the FILE of --check-report, if there is one.

    **Raises**: OSError if it cannot be written.
    """
    if report is None:
        return
    text = json.dumps([*rows], indent=2) + "\n"
    if report == STDOUT:
        sys.stdout.write(text)
        return
    with atomic_write(report) as file:
        file.write(text)
