"""Records of real torch.distributed programs, as `Recorder` writes them of simulated ranks.

A script is recorded as it is, each rank in its own process:

    torchrun --nproc-per-node 4 -m gpusim.recording.torch_hook FOLDER train.py ...

A program records a part of itself in a block: `with TorchRecording("FOLDER"): ...`.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .recorder import RecordedGroup, Recorder, Value

__all__ = ["TorchRecording"]

#: Recorded names of the operators of torch.ops.c10d; those that are not here make no exchange.
OPERATIONS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "broadcast_": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
MESSAGES = ("send", "recv")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
LIBRARIES = ("numpy.", "torch.", "typing_extensions")
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


class TorchRecording(TorchDispatchMode):
    """A block in which this rank's collectives are recorded, with DDP's and FSDP's.

    Each collective is waited for before the program goes on, as its result is recorded. What is
    received in messages is not recorded, nor are functional collectives, which DTensor calls: they
    give a RuntimeWarning.

    **Arguments**: `folder`, and `options` of a `Recorder`: `arrays`, `limit`.

    **Raises**: ValueError outside of a process group, without RANK and WORLD_SIZE.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self.recorder = Recorder(folder, digests=True, keep=0, **options)
        self._numbers: dict[str, int] = {}

    def __enter__(self) -> TorchRecording:
        if dist.is_initialized():
            self.rank, ranks = dist.get_rank(), dist.get_world_size()
        elif {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            self.rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        else:
            raise ValueError("TorchRecording: expected a process group, or RANK and WORLD_SIZE")
        self.recorder.begin(ranks, self.rank, torch=torch.__version__)
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self.recorder.end(error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = OPERATIONS.get(func.__name__.partition(".")[0])
        if func.namespace == "_c10d_functional" and func.__name__ != "wait_tensor.default":
            warnings.warn(f"{func.__name__} is not recorded", RuntimeWarning, stacklevel=2)
        if func.namespace != "c10d" or operation is None:
            return func(*args, **(kwargs or {}))
        place = next(k for k, value in enumerate(args) if isinstance(value, torch.ScriptObject))
        outputs, inputs = (
            [] if operation.endswith("barrier") else tensors_in(part)
            for part in (args[0], args[place - 1])
        )
        group = dist.ProcessGroup.unbox(args[place])
        ranks = tuple(dist.get_process_group_ranks(group))
        name, rest = group.group_name, list(args[place + 1 :])
        about: dict[str, Any] = {}
        number = None
        if operation in MESSAGES:
            any_source = func.__name__.startswith("recv_any")
            about = {"peer": None if any_source else ranks[rest[0]], "tag": rest[-1]}
        else:
            number = self._numbers[name] = self._numbers.get(name, -1) + 1
        if rest and isinstance(rest[0], torch.ScriptObject):
            about["op"] = _operator()
            rest = rest[1:]
        if operation in ROOTED:
            about["root"] = ranks[rest[0]]
        elsewhere = about.get("root", self.rank) != self.rank
        if operation == "all_to_all":
            splits = rest[:2] if rest and isinstance(rest[0], list) else [[], []]
            received, sent = (
                _counts(*pair, len(ranks)) for pair in zip((outputs, inputs), splits, strict=True)
            )
            about |= {"send_counts": sent, "receive_counts": received}
        reads = operation != "recv" and not (operation == "broadcast" and elsewhere)
        values = [_value_of(tensor) for tensor in inputs] if reads else []
        passed = outputs if operation in ("scatter", "recv") else inputs
        kinds = [(str(x.dtype)[6:], tuple(x.shape), x.nbytes) for x in passed]
        made = self.recorder.add(
            RecordedGroup(name, name, group.group_desc, ranks),
            *(self.rank, number, operation, kinds, _call_site(), values),
            **about,
        )
        out = func(*args, **(kwargs or {}))
        if operation not in MESSAGES:
            for work in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(work, torch.ScriptObject):
                    dist.Work.unbox(work).wait()
            results = [] if operation == "reduce" and elsewhere else outputs
            self.recorder.add_results([(self.rank, made)], [_value_of(x) for x in results])
        return out


def tensors_in(part: Any) -> list[Tensor]:
    """The tensors of an argument: itself, or those in its lists."""
    if isinstance(part, Tensor):
        return [part]
    return [tensor for each in part for tensor in tensors_in(each)]


def _value_of(tensor: Tensor) -> Value:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    raw = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)
    return str(tensor.dtype)[6:], tuple(tensor.shape), raw


def _counts(tensors: list[Tensor], splits: list[int], ranks: int) -> tuple[int, ...]:
    """The elements for each rank: of tensors, or of the parts of one, cut by its rows."""
    if len(tensors) == ranks and not splits and ranks > 1:
        return tuple(tensor.numel() for tensor in tensors)
    (tensor,) = tensors
    rows = tensor.shape[0]
    sizes = splits or [rows // ranks] * ranks
    return tuple(size * (tensor.numel() // rows if rows else 0) for size in sizes)


def _frames() -> Iterator[FrameType]:
    """The frames of the program and of torch that called this module, the nearest first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _operator() -> str:
    """The name of the ReduceOp, which operators cannot read: the caller's in torch, or DDP's."""
    for frame in _frames():
        found = frame.f_locals.get("op")
        if (
            frame.f_globals.get("__name__", "").startswith("torch.distributed")
            and found is not None
        ):
            return str(getattr(found, "op", found)).rpartition(".")[2]
    return "SUM"


def _call_site() -> str:
    """file:line of the nearest frame that is neither a library's nor this module's."""
    for frame in _frames():
        path = frame.f_code.co_filename
        if path == __file__ or frame.f_globals.get("__name__", "").startswith(LIBRARIES):
            continue
        if "site-packages" in path or not path.startswith((STANDARD_LIBRARY, "<frozen")):
            return f"{path}:{frame.f_lineno}"
    return "unknown line"


def main(words: list[str]) -> None:
    """Record a script: FOLDER SCRIPT ARGUMENTS."""
    if len(words) < 2:
        raise SystemExit("usage: python -m gpusim.recording.torch_hook FOLDER SCRIPT ...")
    folder, script, *_ = words
    sys.argv = words[1:]
    sys.path[0] = str(Path(script).absolute().parent)
    with TorchRecording(folder, arrays=range(sys.maxsize)):
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
