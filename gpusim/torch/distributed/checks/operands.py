"""The operands of one call: what an engine refuses, as data with its source, and aliases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..accelerator.marks import ON_CPU, mark_of
from ..calls.arguments import RULES, Layout, is_contiguous_in_format
from .engines import engine_of_group
from .spans import meet, spans_of

if TYPE_CHECKING:
    from .watch import Call, Watch

__all__ = ["REFUSALS", "Refusals", "check_operands"]


@dataclass(frozen=True)
class Refusals:
    """The operands that an engine refuses.

    **Attributes**: `source` is where the rules are from. `dtypes` are those that it takes, complex
    numbers as pairs of real ones. `operators` are those of ReduceOp that it lacks, `calls` the
    operations that it lacks. `devices` are the types of devices whose tensors it takes, and
    `off_device` the operations that it lacks on another device than the host.
    """

    source: str
    dtypes: frozenset[torch.dtype]
    operators: frozenset[str]
    calls: Mapping[str, str]
    devices: frozenset[str]
    off_device: frozenset[str] = frozenset()


_NCCL_DTYPES = """
    bfloat16 bool float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    int32 int64 int8 uint8
"""

REFUSALS: Mapping[str, Refusals] = {
    "nccl": Refusals(
        source="ncclDataType_t and ncclRedOp_t of NCCL 2.27's user guide; ProcessGroupNCCL.cpp and "
        "NCCLUtils.cpp of PyTorch 2.13: checkTensor, getNcclDataType, getNcclReduceOp",
        dtypes=frozenset(getattr(torch, name) for name in _NCCL_DTYPES.split()),
        operators=frozenset(["BAND", "BOR", "BXOR"]),
        calls={
            "recv from any rank": "NCCL has no receive from any rank",
            "monitored_barrier": "monitored_barrier is gloo's alone",
            "sparse": "NCCL has no sparse all_reduce",
        },
        devices=frozenset(["cuda"]),
    ),
    "gloo": Refusals(
        source="ProcessGroupGloo.cpp of PyTorch 2.13; torch.distributed's documentation, the table "
        "of backends",
        dtypes=RULES["gloo"].dtypes or frozenset(),
        operators=frozenset(["PREMUL_SUM"]),
        calls={},
        devices=frozenset(["cpu", "cuda"]),
        off_device=frozenset(["send", "recv"]),
    ),
}


def check_operands(watch: Watch, call: Call) -> list[tuple[str, str]]:
    """Refusals of an engine for a call that is about to be posted, and its aliases.

    **Returns**: the kind and text of each finding.
    """
    given = call.given
    tensors = [*given.written, *given.only_read]
    found = list(_refused(watch, call, tensors))
    if call.inside != "torch":
        found += [("aliased-operands", text) for text in _aliases(call)]
    return found


def device_of(watch: Watch, tensors: Sequence[Tensor]) -> str:
    """The type of device that tensors are on, in the program's view; "" if it is not known."""
    if not tensors:
        return ""
    if watch.rank.launch.device != "cpu":
        return tensors[0].device.type
    marks = {mark_of(each) for each in tensors}
    if marks == {ON_CPU}:
        return "cpu"
    return "" if None in marks or ON_CPU in marks else "cuda"


def engine_of(watch: Watch, device: str) -> str:
    """The engine whose rules hold for tensors of a device; "" if there are none."""
    if watch.engine:
        return watch.engine
    parts = [part.rpartition(":") for part in watch.rank.backend.lower().split(",")]
    for kind, _, name in parts:
        if kind in ("", device or "cuda") and name in REFUSALS:
            return name
    unnamed = parts[0][2] in ("", "undefined")
    return {"cuda": "nccl", "cpu": "gloo"}.get(device, "") if unnamed else ""


def _is_mixed(watch: Watch) -> bool:
    """Whether the program has a backend of its own for tensors of the host."""
    backend = watch.rank.backend.lower()
    return backend in ("", "undefined") or "cpu:" in backend


def _refused(watch: Watch, call: Call, tensors: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    device = device_of(watch, tensors)
    engine = engine_of_group(watch, call.group, device)
    rules = REFUSALS.get(engine)
    if rules is None:
        return
    given, words = call.given, call.words
    plays = watch.rank.launch.device == "cpu" and call.inside != "torch"
    if plays and device and device not in rules.devices:
        if not (device == "cpu" and _is_mixed(watch)):
            yield "device-refused", f"{words}: {engine} has no tensors on the {device}"
        return
    if plays and device == "cuda" and given.operation in rules.off_device:
        yield "device-refused", f"{words}: {engine} has no {given.operation} of tensors on a GPU"
    why = rules.calls.get(given.operation)
    if given.operation == "recv" and "source" not in given.arguments:
        why = rules.calls.get("recv from any rank", why)
    if any(each.is_sparse for each in tensors):
        why = rules.calls.get("sparse", why)
    if why is not None:
        yield "call-refused", f"{words}: {why}"
    for each in tensors:
        dtype = each.dtype.to_real() if each.dtype.is_complex else each.dtype
        if dtype not in rules.dtypes:
            names = ", ".join(sorted(str(known)[6:] for known in rules.dtypes))
            yield "dtype-refused", f"{words}: {engine} has no {str(each.dtype)[6:]}; it has {names}"
            break
    if given.op in rules.operators:
        yield "dtype-refused", f"{words}: {engine} has no ReduceOp.{given.op}"
    yield from _layouts(engine, call, tensors)


def _layouts(engine: str, call: Call, tensors: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    layout = RULES[engine].layouts.get(call.operation, Layout.ANY)
    if layout not in (Layout.CONTIGUOUS, Layout.FORMAT):
        return
    for each in tensors:
        if each.is_sparse or each.is_contiguous():
            continue
        if layout is Layout.FORMAT and is_contiguous_in_format(each):
            continue
        yield (
            "not-contiguous",
            f"{call.words}: {engine} takes contiguous tensors only; one of shape "
            f"{list(each.shape)} has strides {tuple(each.stride())}",
        )
        return


def _aliases(call: Call) -> Iterator[str]:
    """Faults of the memory that operands of one call share."""
    given, place, size = call.given, call.group.rank(), call.group.size()
    outputs = [spans_of([each]) for each in given.written]
    for first, one in enumerate(outputs):
        for second, other in enumerate(outputs[:first]):
            if meet(one, other):
                yield f"{call.words}: outputs {second} and {first} share memory"
                return
    if given.reads_written:
        return
    for number, tensor in enumerate(given.only_read):
        read = spans_of([tensor])
        for target, (output, written) in enumerate(zip(given.written, outputs, strict=True)):
            if not meet(read, written):
                continue
            if _is_in_place(call.operation, tensor, output, number, target, place, size):
                continue
            yield f"{call.words}: an input and an output share memory, not in the documented form"
            return


def _is_in_place(
    operation: str, read: Tensor, written: Tensor, number: int, target: int, place: int, size: int
) -> bool:
    """Whether an input is the part of an output that the engine's in-place form has there."""
    start, own = read.data_ptr(), written.data_ptr()
    if operation == "all_gather_into_tensor":
        return start == own + place * read.numel() * read.element_size()
    if operation == "reduce_scatter_tensor":
        return own == start + place * written.numel() * written.element_size()
    if operation in ("all_gather", "gather"):
        return target % size == place and start == own and read.shape == written.shape
    if operation in ("scatter", "reduce_scatter"):
        return number % size == place and start == own and read.shape == written.shape
    return False
