"""All bugs, and the correct configurations: of the programs here, and of libraries."""

from __future__ import annotations

from tests.equal import data_bugs, other_bugs, tensor_bugs
from tests.equal.bug import Bug

__all__ = ["BUGS", "CORRECT", "LIBRARIES"]

BUGS: tuple[Bug, ...] = (*tensor_bugs.BUGS, *data_bugs.BUGS, *other_bugs.BUGS)
CORRECT: tuple[tuple[str, int], ...] = (
    *tensor_bugs.CORRECT,
    *data_bugs.CORRECT,
    *other_bugs.CORRECT,
)
GPU = ("--device", "cpu")
OTHERS = "frameworks/programs"
MEGATRON = f"{OTHERS}/megatron_gpt.py"
CONTEXT = f"{OTHERS}/context_parallel_torch.py"
TENSOR = f"{OTHERS}/tensor_parallel.py"
TRAINER = f"{OTHERS}/trainer.py"
LLAMA = "equal/programs/llama_plan.py"
LOOP, FSDP2 = f"{OTHERS}/accelerate_loop.py", f"{OTHERS}/accelerate_fsdp2.py"
LIGHTNING = f"{OTHERS}/lightning_trainer.py --strategy ddp"
#: Programs below `tests` that run in the environment of `make frameworks`: the reference, the
#: candidate, its ranks, and options of `gpusim equal`.
LIBRARIES: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    (MEGATRON, MEGATRON, 2, GPU),
    (MEGATRON, f"{MEGATRON} --zero", 4, GPU),
    (MEGATRON, f"{MEGATRON} --tp 2 --sp", 2, GPU),
    (MEGATRON, f"{MEGATRON} --tp 2 --sp --zero", 4, GPU),
    (MEGATRON, f"{MEGATRON} --pp 2", 2, GPU),
    (MEGATRON, f"{MEGATRON} --pp 2 --vpp 2", 4, GPU),
    (MEGATRON, f"{MEGATRON} --tp 2 --pp 2", 4, GPU),
    (MEGATRON, f"{MEGATRON} --tp 2 --pp 2", 8, GPU),
    (f"{MEGATRON} --ep 1", f"{MEGATRON} --ep 2", 2, GPU),
    (f"{MEGATRON} --ep 1", f"{MEGATRON} --tp 2 --sp --ep 2", 4, GPU),
    (CONTEXT, CONTEXT, 2, GPU),
    (CONTEXT, CONTEXT, 4, GPU),
    (f"{TENSOR} --tp 1", f"{TENSOR} --tp 2", 2, ()),
    (f"{TENSOR} --tp 1", f"{TENSOR} --tp 4", 4, ()),
    (LLAMA, LLAMA, 2, ()),
    (LLAMA, LLAMA, 4, ()),
    (f"{TRAINER} --mode ddp", f"{TRAINER} --mode ddp", 2, ()),
    (f"{TRAINER} --mode ddp", f"{TRAINER} --mode fsdp2", 4, ()),
    (LOOP, LOOP, 2, ()),
    (FSDP2, FSDP2, 2, ()),
    (LIGHTNING, LIGHTNING, 2, ()),
)
