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
MEGATRON = "megatron_gpt.py"
#: Programs of `tests/frameworks`, which run in its environment: the reference, the candidate, its
#: ranks, and options of `gpusim equal`.
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
    ("context_parallel_torch.py", "context_parallel_torch.py", 2, GPU),
    ("context_parallel_torch.py", "context_parallel_torch.py", 4, GPU),
    ("tensor_parallel.py --tp 1", "tensor_parallel.py --tp 2", 2, ()),
    ("tensor_parallel.py --tp 1", "tensor_parallel.py --tp 4", 4, ()),
    ("llama_plan.py", "llama_plan.py", 2, ()),
    ("llama_plan.py", "llama_plan.py", 4, ()),
    ("trainer.py --mode ddp", "trainer.py --mode ddp", 2, ()),
    ("trainer.py --mode ddp", "trainer.py --mode fsdp2", 4, ()),
    ("accelerate_loop.py", "accelerate_loop.py", 2, ()),
    ("accelerate_fsdp2.py", "accelerate_fsdp2.py", 2, ()),
    ("lightning_trainer.py --strategy ddp", "lightning_trainer.py --strategy ddp", 2, ()),
)
