"""The rows of the table: which program of which framework runs on how many ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABSENT", "ROWS", "Row"]

#: Ranks that both launchers run; more are simulated alone.
BOTH = (2, 4)


@dataclass(frozen=True)
class Row:
    """A program and the numbers of ranks that it runs on.

    **Attributes**: `family`, the framework; `package`, the distribution whose version is shown;
    `what`, a few words; `program`, a file of `programs` with its arguments; `ranks`, where it is
    compared with gloo; `scale`, where it runs on simulated ranks alone; `gpu`, whether it asks for
    GPUs, which gloo's machine lacks: then `reference`, if any, is the program whose values on one
    rank the values have to equal, up to float32 rounding.
    """

    family: str
    package: str
    what: str
    program: str
    ranks: tuple[int, ...] = BOTH
    scale: tuple[int, ...] = ()
    gpu: bool = False
    reference: str = ""


SCHEDULES = (
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def _torch(what: str, program: str, *scale: int, family: str = "PyTorch") -> Row:
    return Row(family, "torch", what, program, scale=scale)


ROWS: tuple[Row, ...] = (
    _torch("DDP", "ddp.py", 64, 256),
    _torch("FSDP1", "fsdp.py --version 1", 64),
    _torch("FSDP1, bfloat16", "fsdp.py --version 1 --strategy SHARD_GRAD_OP --bf16"),
    _torch("FSDP1, original parameters", "fsdp.py --version 1 --original"),
    _torch("FSDP2", "fsdp.py", 64, 256),
    _torch("FSDP2, bfloat16", "fsdp.py --bf16"),
    _torch("tensor parallel, with FSDP2 on 4", "tensor_parallel.py", 64),
    _torch("context parallel", "context_parallel.py", 64),
    _torch("DDP compiled", "compiled.py"),
    _torch("FSDP2 compiled", "compiled.py --fsdp2"),
    _torch("checkpoints between 1, 2 and all ranks", "checkpoint.py"),
    *(_torch("pipeline", f"pipeline.py {name}", family="pipelining") for name in SCHEDULES),
    _torch("a script in its manner", "nano_gpt.py", 64, family="nanoGPT"),
    _torch("a model in its manner", "dlrm.py", family="DLRM"),
)

#: Frameworks without a row, with the cause.
ABSENT: dict[str, str] = {}
