"""Warnings that every compilation would repeat: as often as `Options.maxRepeatLogs` says."""

from __future__ import annotations

from collections import Counter

from gpusim.poptorch._logging import logger
from gpusim.poptorch.options import Options

__all__ = ["Warnings"]

_said: Counter[str] = Counter()


class Warnings:
    """Warns, of each thing only so many times in a process."""

    def __init__(self, options: Options) -> None:
        self._most: int | None = options.max_repeat_logs

    def __call__(self, text: str) -> None:
        _said[text] += 1
        if self._most is not None and _said[text] > self._most:
            return
        last = _said[text] == self._most
        logger.warning("%s%s", text, " (no more of these)" if last else "")
