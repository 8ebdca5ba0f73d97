"""The rows of the table: programs of frameworks, and on how many ranks they run."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ABSENT", "BOTH", "MANY", "PRELOAD", "ROWS", "Row"]

#: Ranks that both launchers run.
BOTH = (2, 4)
#: Ranks that are simulated alone, by `--many`.
MANY = (64, 256)
#: What the many simulated ranks of a family import once.
PRELOAD: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate", "transformers.models.llama.modeling_llama"),
    "transformers": ("transformers.models.llama.modeling_llama", "transformers.trainer"),
    "Lightning": ("lightning", "torchmetrics.classification"),
    "Megatron-Core": ("megatron.core.models.gpt", "megatron.core.optimizer"),
    "DeepSpeed": ("deepspeed",),
    "torchao": ("torchao.float8", "torchao.prototype.quantized_training"),
    "torchtitan": ("datasets", "torchao.float8", "torch.distributed.pipelining"),
    "TorchMetrics": ("torchmetrics.classification",),
    "TRL": ("trl", "transformers.models.llama.modeling_llama", "transformers.trainer"),
}


@dataclass(frozen=True)
class Row:
    """A program and the numbers of ranks that it runs on.

    **Attributes**: `family`, the framework; `package`, the distribution whose version is shown;
    `what`, a few words; `program`, a file of `programs` with its arguments; `ranks`, where it is
    compared with gloo; `scale`, where it runs on simulated ranks alone (`--many`); `gpu`, whether
    it asks for GPUs, which gloo's machine lacks: then `reference`, if any, is the program whose
    values on one rank the values have to equal, up to float32 rounding.
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
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


def _torch(what: str, program: str, *scale: int, family: str = "PyTorch") -> Row:
    return Row(family, "torch", what, program, scale=scale)


def _megatron(what: str, options: str = "", *ranks: int, scale: tuple[int, ...] = ()) -> Row:
    program = f"megatron_gpt.py {options}".strip()
    one = "megatron_gpt.py --ep 1" if "--ep" in options else "megatron_gpt.py"
    return Row(
        "Megatron-Core", "megatron-core", what, program, ranks or BOTH, scale, True, reference=one
    )


def _deepspeed(stage: int, options: str = "", scale: tuple[int, ...] = ()) -> Row:
    program = f"deepspeed_zero.py --stage {stage}{options}"
    what = f"ZeRO {stage}{', bfloat16' if options else ''}"
    return Row("DeepSpeed", "deepspeed", what, program, scale=scale)


def _torchtitan(
    what: str,
    options: str = "",
    ranks: tuple[int, ...] = BOTH,
    scale: tuple[int, ...] = (),
    gpu: bool = False,
) -> Row:
    program = f"torchtitan_llama.py{options}"
    return Row("torchtitan", "torchtitan", what, program, ranks, scale, gpu)


ROWS: tuple[Row, ...] = (
    _torch("DDP", "ddp.py", *MANY),
    _torch("FSDP1", "fsdp.py --version 1"),
    _torch("FSDP1, bfloat16", "fsdp.py --version 1 --strategy SHARD_GRAD_OP --bf16"),
    _torch("FSDP1, original parameters", "fsdp.py --version 1 --original"),
    _torch("FSDP2", "fsdp.py", *MANY),
    _torch("FSDP2, bfloat16", "fsdp.py --bf16"),
    _torch("tensor parallel, with FSDP2 on 4", "tensor_parallel.py", 64),
    _torch("context parallel", "context_parallel.py"),
    Row(
        "PyTorch",
        "torch",
        "PyTorch's context_parallel",
        "context_parallel_torch.py",
        gpu=True,
        reference="context_parallel_torch.py",
    ),
    _torch("DDP compiled", "compiled.py"),
    _torch("FSDP2 compiled", "compiled.py --fsdp2"),
    Row("PyTorch", "torch", "checkpoints between 1, 2, 4 and 8 ranks", "checkpoint.py", (2, 4, 8)),
    _torch("pipeline", "pipeline.py 1F1B", 64, family="pipelining"),
    *(_torch("pipeline", f"pipeline.py {name}", family="pipelining") for name in SCHEDULES),
    _torch("a script in its manner", "nano_gpt.py", *MANY, family="nanoGPT"),
    _torch("a trainer in its manner", "mini_gpt.py", family="minGPT"),
    _torch("a model in its manner", "dlrm.py", *MANY, family="DLRM"),
    _megatron("data parallel", "", 2, scale=MANY),
    _megatron("distributed optimizer", "--zero"),
    _megatron("tensor and sequence parallel", "--tp 2 --sp", 2),
    _megatron("tensor and sequence parallel, distributed optimizer", "--tp 2 --sp --zero", 4),
    _megatron("pipeline, 1F1B", "--pp 2", 2),
    _megatron("pipeline, interleaved", "--pp 2 --vpp 2"),
    _megatron("experts", "--ep 2"),
    _megatron("experts, tensor and sequence parallel", "--tp 2 --sp --ep 2", 4),
    _megatron("tensor, pipeline and data parallel", "--tp 2 --pp 2", 4, 8),
    _deepspeed(1),
    _deepspeed(2, scale=MANY),
    _deepspeed(2, " --bf16"),
    _deepspeed(3),
    _torchtitan("FSDP2", scale=(64,)),
    _torchtitan("FSDP2 and TP", " --tp 2"),
    _torchtitan("pipeline, interleaved", " --pp 2 --schedule Interleaved1F1B", (2,)),
    _torchtitan("FSDP2, TP and pipeline, 1F1B", " --tp 2 --pp 2", (4, 8)),
    _torchtitan("TP and pipeline, as for GPUs", " --tp 2 --pp 2 --schedule GPipe", (4,), gpu=True),
    Row("torchao", "torchao", "int8, FSDP2", "torchao_training.py --kind int8", scale=(64,)),
    Row("torchao", "torchao", "float8, FSDP2", "torchao_training.py --kind float8"),
    Row(
        "Triton",
        "triton",
        "a kernel, interpreted",
        "triton_kernel.py",
        gpu=True,
        reference="triton_kernel.py",
    ),
    Row("accelerate", "accelerate", "loop, state", "accelerate_loop.py", scale=MANY),
    Row("accelerate", "accelerate", "FSDP2", "accelerate_fsdp2.py"),
    Row("accelerate", "accelerate", "FSDP2, bfloat16", "accelerate_fsdp2.py --bf16"),
    Row("transformers", "transformers", "Trainer, DDP", "trainer.py --mode ddp", scale=MANY),
    Row("transformers", "transformers", "Trainer, FSDP2", "trainer.py --mode fsdp2"),
    Row("transformers", "transformers", "Trainer, tp_plan", "trainer.py --mode tp"),
    Row("Lightning", "lightning", "Fabric, DDP", "fabric.py --strategy ddp", scale=MANY),
    Row("Lightning", "lightning", "Fabric, FSDP2 and TP", "fabric.py --strategy model_parallel"),
    Row("Lightning", "lightning", "Trainer, DDP", "lightning_trainer.py --strategy ddp"),
    Row(
        "Lightning",
        "lightning",
        "Trainer, FSDP2 and TP",
        "lightning_trainer.py --strategy model_parallel",
    ),
    Row("Lightning", "lightning", "Fabric, FSDP1", "fabric.py --strategy fsdp --gpu", gpu=True),
    Row(
        "Lightning",
        "lightning",
        "Trainer, FSDP1",
        "lightning_trainer.py --strategy fsdp --gpu",
        gpu=True,
    ),
    Row("TorchMetrics", "torchmetrics", "metrics under DDP", "metrics.py", scale=MANY),
    Row("TRL", "trl", "SFTTrainer", "trl_sft.py", scale=MANY),
    Row("TRL", "trl", "DPOTrainer", "trl_dpo.py"),
    Row("TRL", "trl", "GRPOTrainer", "trl_grpo.py"),
)

#: Frameworks without a row, with the cause.
ABSENT: dict[str, str] = {"verl": "its workers start under Ray, which starts processes itself"}
