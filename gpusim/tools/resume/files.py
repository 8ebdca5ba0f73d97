"""Which of a rank's calls write a checkpoint, and which read one.

A rank knows its own calls alone, with its own count of steps. It leaves an empty file in the
trace's folder for each step after which it has saved, by which all ranks know that there is a
checkpoint: only rank 0 may write one.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .contents import contents_of
from .sites import site

__all__ = ["Checkpoints", "saved_steps"]

LOGS = {".csv", ".html", ".json", ".jsonl", ".lock", ".log", ".md", ".png", ".txt", ".yaml"}
"""Suffixes of files that alone are no checkpoint."""

EVENTS = "events.out."
"""The beginning of the names of TensorBoard's files."""

MARK = "saved-"

_current: Checkpoints | None = None
_is_audited = False


def saved_steps(folder: Path) -> list[int]:
    """The steps after which any rank has saved, in order."""
    marks = folder.glob(f"{MARK}*")
    return sorted({int(path.name.rpartition("-")[2]) for path in marks})


class Checkpoints:
    """Notes where and when the rank saves and loads. Owner: the rank's main thread."""

    def __init__(self, folder: Path, checkpoint: str, rank: int, steps: Callable[[], int]) -> None:
        self._folder, self._rank, self._steps = folder, rank, steps
        self._checkpoint = os.path.abspath(checkpoint) + os.sep
        self._main = threading.get_ident()
        #: Of each step after which this rank has saved, the call.
        self.saved: dict[int, str] = {}
        #: The last call that has read from the checkpoint's folder.
        self.loaded = ""
        #: Of each step after which this rank has called torch.save, what was in it.
        self.contents: dict[int, dict[str, str]] = {}

    def install(self, stack: ExitStack) -> None:
        """Put the wrappers in, until the stack ends."""
        global _current, _is_audited
        _current = self
        stack.callback(_forget)
        if not _is_audited:  # an audit hook stays: it asks who is there
            _is_audited = True
            sys.addaudithook(_audit)
        self._wrap(stack, torch, "save", 1, self.note_save, "f")
        self._wrap(stack, torch, "load", 0, self.note_load, "f")
        import torch.distributed.checkpoint as checkpoint
        from torch.distributed.checkpoint import state_dict_saver

        for owner in (checkpoint, state_dict_saver):
            self._wrap(stack, owner, "save", None, self.note_save, "checkpoint_id")
        if find_spec("safetensors") is not None:
            import safetensors.torch

            self._wrap(stack, safetensors.torch, "serialize_file", 1, self.note_save, "filename")

    def _wrap(
        self,
        stack: ExitStack,
        owner: Any,
        name: str,
        place: int | None,
        note: Callable[[Any], None],
        keyword: str,
    ) -> None:
        real = getattr(owner, name, None)
        if real is None:  # of another release
            return

        @functools.wraps(real)
        def call(*args: Any, **named: Any) -> Any:
            path = named.get(keyword)
            if path is None and place is not None and len(args) > place:
                path = args[place]
            writer = named.get("storage_writer")
            note(path if path is not None else getattr(writer, "path", None))
            if owner is torch and name == "save" and args and self.is_ours(path):
                self.contents.setdefault(self._steps(), {}).update(contents_of(args[0]))
            return real(*args, **named)

        stack.callback(setattr, owner, name, real)
        setattr(owner, name, call)

    def is_ours(self, path: Any) -> bool:
        """Whether a file is in the checkpoint's folder."""
        if not isinstance(path, str | bytes | os.PathLike):
            path = getattr(path, "name", None)
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        return (os.path.abspath(os.fsdecode(path)) + os.sep).startswith(self._checkpoint)

    def note_save(self, path: Any) -> None:
        """The rank saves to a path; of another folder, that is no checkpoint."""
        if not self.is_ours(path):
            return
        step = self._steps()
        if step not in self.saved:
            self.saved[step] = site()
            (self._folder / f"{MARK}{self._rank}-{step}").touch()

    def note_load(self, path: Any) -> None:
        """The rank reads from a path."""
        if self.is_ours(path):
            self.loaded = site()

    def on_open(self, path: Any, mode: Any, flags: Any) -> None:
        """Python opens a file. In other threads a checkpoint is written that a call has begun."""
        if threading.get_ident() != self._main or not self.is_ours(path):
            return
        text = os.fsdecode(path)
        writes = any(each in (mode or "") for each in "wxa+")
        if mode is None and isinstance(flags, int):
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        if not writes:
            if os.path.isfile(text):
                self.loaded = site()
        elif os.path.splitext(text)[1] not in LOGS and EVENTS not in text:
            if not os.path.isdir(text) and not _is_word(text):
                self.note_save(text)


def _is_word(path: str) -> bool:
    """Whether a file is one that names the latest checkpoint."""
    return os.path.basename(path).startswith("latest") and not os.path.splitext(path)[1]


def _audit(event: str, args: tuple[Any, ...]) -> None:
    current = _current
    if event == "open" and current is not None:
        path, mode, flags = args
        if isinstance(path, str | bytes):
            current.on_open(path, mode, flags)


def _forget() -> None:
    global _current
    _current = None
