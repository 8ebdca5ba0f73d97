"""Digests of what a rank's optimizers hold after each step.

A program calls `watch()` once. From then on each optimizer's step writes a line of JSON to the
rank's file in the folder FRAMEWORKS_OUT: a digest of each parameter and of its gradient. `say`
writes what the program evaluates. Two runs compute the same if their files are the same.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.distributed_c10d import _world
from torch.optim.optimizer import register_optimizer_step_post_hook

_GROUPS: dict[object, object] = {}  # kept alive: see `watch`
_CODES: list[int] = []  # of sys.exit
WIDTH = 8  # hexadecimal digits of a tensor's digest


def watch() -> None:
    """Write a line after every step of every optimizer that this process makes."""
    register_optimizer_step_post_hook(_after_step)
    if os.environ.get("FRAMEWORKS_LAUNCHER") == "gloo":
        # PyTorch's gloo may hang or abort where a group ends: its end joins, under the GIL, a
        # thread of gloo's that waits for the GIL to drop a tensor. So no group ends before the
        # process does, and the process leaves before Python drops its modules.
        register_optimizer_step_post_hook(lambda *_: _GROUPS.update(_world.pg_map))
        sys.exit = _exit
        atexit.register(_leave)


def model(module: torch.nn.Module) -> None:
    """Write the parameters and gradients of a module, where no optimizer of torch's has them."""
    _write("model", [_of_parameter(each) for each in module.parameters()])


def say(name: str, value: object) -> None:
    """Print an evaluation, and write it down: floats by all their digits."""
    text = _text(value)
    print(f"{name}: {text}", flush=True)
    _write(name, text)


def _exit(code: object = None) -> NoReturn:
    _CODES.append(code if isinstance(code, int) else int(code is not None))
    raise SystemExit(code)


def _leave() -> None:
    failed = hasattr(sys, "last_value")  # Python sets it as it shows a traceback
    os._exit(_CODES[-1] if _CODES else int(failed))


def _after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    groups = [group["params"] for group in optimizer.param_groups]
    _write("step", [_of_parameter(each) for group in groups for each in group])


def _of_parameter(parameter: torch.Tensor) -> str:
    gradient = parameter.grad
    return _of(parameter) + ("" if gradient is None else "/" + _of(gradient))


def _of(tensor: torch.Tensor) -> str:
    """The digest of a tensor's dtype, shape and bytes; of a subclass, those of its parts."""
    digest = hashlib.sha256()
    for part in _parts(tensor.detach()):
        digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
        digest.update(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:WIDTH]


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    inner = getattr(tensor, "__tensor_flatten__", None)
    if tensor.is_sparse:
        whole = tensor.coalesce()
        yield from (whole.indices(), whole.values())
    elif hasattr(tensor, "to_local"):
        yield from _parts(tensor.to_local())
    elif type(tensor) not in (torch.Tensor, torch.nn.Parameter) and inner is not None:
        for name in inner()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _text(value.tolist())
    if isinstance(value, dict):
        return " ".join(f"{name}={_text(each)}" for name, each in sorted(value.items()))
    if isinstance(value, list | tuple):
        return "[" + " ".join(map(_text, value)) + "]"
    return repr(value)


def _write(kind: str, what: object) -> None:
    folder = os.environ.get("FRAMEWORKS_OUT")
    if folder is None:  # the program runs for itself
        return
    with open(Path(folder) / f"rank-{os.environ.get('RANK', '0')}.jsonl", "a") as file:
        file.write(json.dumps([kind, what]) + "\n")
