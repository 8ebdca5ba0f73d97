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
from typing import Any, NamedTuple

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
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""The same for torch.ops._c10d_functional, by what their names begin with."""
MESSAGES = ("send", "recv")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
LIBRARIES = ("numpy.", "torch.", "typing_extensions")
STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


class Call(NamedTuple):
    """A call of an operator.

    `passed` are the tensors whose shapes are recorded. `outputs` is None where the operator returns
    them. In `about`, "root" and "peer" are ranks in the group.
    """

    operation: str
    group: Any
    inputs: list[Tensor]
    passed: list[Tensor]
    outputs: list[Tensor] | None
    about: dict[str, Any]


class TorchRecording(TorchDispatchMode):
    """A block in which this rank's collectives are recorded, with DDP's and FSDP's.

    Each collective is waited for before the program goes on, as its result is recorded; also
    functional ones, which DTensor calls. What a message brings is recorded after the program has
    waited for it, before the next operator.

    **Arguments**: `folder`, and `options` of a `Recorder`: `arrays`, `limit`.

    **Raises**: ValueError outside of a process group, without RANK and WORLD_SIZE; RuntimeError in
    a simulated rank.
    """

    def __init__(self, folder: str | os.PathLike[str], **options: Any) -> None:
        super().__init__()
        self.recorder = Recorder(folder, digests=True, keep=0, **options)
        self._numbers: dict[str, int] = {}
        self._receiving: list[tuple[int, list[Any], list[Tensor]]] = []

    def __enter__(self) -> TorchRecording:
        if dist.is_initialized():
            if type(dist.group.WORLD).__module__.startswith("gpusim."):
                raise RuntimeError(
                    "TorchRecording: this rank is simulated: record with gpusim torchrun --record, "
                    "with launch(..., recorder=...), or with gpusim.record around the launch"
                )
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
        self._add_received()
        self.recorder.end(error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor calls operators on the tensors that it holds
        if self._receiving:
            self._add_received()  # before an operator that may change what was received
        call = self._read(func, args, kwargs)
        if call is None:
            return func(*args, **kwargs)
        name, ranks = call.group.group_name, tuple(dist.get_process_group_ranks(call.group))
        message = call.operation in MESSAGES
        if not message:
            self._numbers[name] = self._numbers.get(name, -1) + 1
        about = dict(call.about)
        for each in ("root", "peer"):
            if about.get(each) is not None:
                about[each] = ranks[about[each]]
        elsewhere = about.get("root", self.rank) != self.rank
        reads = call.operation != "recv" and not (call.operation == "broadcast" and elsewhere)
        kinds = [(str(x.dtype)[6:], tuple(x.shape), x.nbytes) for x in call.passed]
        made = self.recorder.add(
            RecordedGroup(name, name, call.group.group_desc, ranks),
            self.rank,
            None if message else self._numbers[name],
            call.operation,
            kinds,
            _call_site(),
            [_value_of(tensor) for tensor in call.inputs] if reads else [],
            **about,
        )
        out = func(*args, **kwargs)
        works = [
            dist.Work.unbox(work)
            for work in (out if isinstance(out, (tuple, list)) else [out])
            if isinstance(work, torch.ScriptObject)
        ]
        if message:
            if call.operation == "recv":
                self._receiving.append((made, works, call.passed))
            return out
        for work in works:
            work.wait()
        outputs = call.outputs
        if outputs is None:
            outputs = [_wait_tensor(tensor) for tensor in tensors_in(out)]
        results = [] if call.operation == "reduce" and elsewhere else outputs
        self.recorder.add_results([(self.rank, made)], [_value_of(x) for x in results])
        return out

    def _add_received(self) -> None:
        """Record the tensors of messages that the program has waited for."""
        waiting = []
        for made, works, tensors in self._receiving:
            if all(work.is_completed() for work in works):
                self.recorder.add_results([(self.rank, made)], [_value_of(x) for x in tensors])
            else:
                waiting.append((made, works, tensors))
        self._receiving = waiting

    def _read(self, func: Any, args: Any, kwargs: Any) -> Call | None:
        """The call that an operator makes; None if it makes none."""
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d" and name in OPERATIONS:
            return _read_c10d(OPERATIONS[name], name, args)
        if func.namespace != "_c10d_functional":
            return None
        given = dict(
            zip((argument.name for argument in func._schema.arguments), args, strict=False)
        )
        given |= kwargs
        found = [operation for prefix, operation in FUNCTIONAL.items() if name.startswith(prefix)]
        if found:
            return _read_functional(found[0], given)
        if "group_name" in given:
            warnings.warn(f"{func.__name__} is not recorded", RuntimeWarning, stacklevel=3)
        return None


def _read_c10d(operation: str, name: str, args: Any) -> Call:
    """A call of torch.ops.c10d: outputs, inputs, the group, and what is the operation's own."""
    place = next(k for k, value in enumerate(args) if isinstance(value, torch.ScriptObject))
    outputs, inputs = (
        [] if operation.endswith("barrier") else tensors_in(part)
        for part in (args[0], args[place - 1])
    )
    group, rest = dist.ProcessGroup.unbox(args[place]), list(args[place + 1 :])
    about: dict[str, Any] = {}
    if operation in MESSAGES:
        about = {"peer": None if name.startswith("recv_any") else rest[0], "tag": rest[-1]}
    if rest and isinstance(rest[0], torch.ScriptObject):
        about["op"] = _operator()
        rest = rest[1:]
    if operation in ROOTED:
        about["root"] = rest[0]
    if operation == "all_to_all":
        splits = rest[:2] if rest and isinstance(rest[0], list) else [[], []]
        about |= _exchanged(inputs, splits[1], outputs, splits[0], group.size())
    passed = outputs if operation in ("scatter", "recv") else inputs
    return Call(operation, group, inputs, passed, outputs, about)


def _read_functional(operation: str, given: dict[str, Any]) -> Call:
    """A call of torch.ops._c10d_functional, whose outputs are what it returns."""
    inputs = tensors_in(given.get("inputs", given.get("input")))
    group = given["group_name"]
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    about: dict[str, Any] = {}
    if "reduce_op" in given:
        about["op"] = given["reduce_op"].upper()
    if operation == "broadcast":
        about["root"] = given["src"]
    if operation == "all_to_all":
        received, sent = given["output_split_sizes"], given["input_split_sizes"]
        rows = inputs[0].new_empty((sum(received), *inputs[0].shape[1:]), device="meta")
        about |= _exchanged(inputs, sent, [rows], received, group.size())
    return Call(operation, group, inputs, inputs, None, about)


def _exchanged(
    inputs: list[Tensor], sent: list[int], outputs: list[Tensor], received: list[int], ranks: int
) -> dict[str, Any]:
    """The elements that a rank sends to each rank and receives from each."""
    return {
        "send_counts": _counts(inputs, sent, ranks),
        "receive_counts": _counts(outputs, received, ranks),
    }


def _wait_tensor(tensor: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return waited


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
