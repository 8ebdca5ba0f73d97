"""Public reports of silent bugs, each with the reduced program that has its bug."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KINDS", "REPORTS", "Report"]

KINDS = {
    "Gradients and sums": "A sum lacks a part, has one twice, or is divided by the wrong number.",
    "Replicas drift apart": "Copies that should be equal are not, and the loss falls all the same.",
    "Random numbers": "Ranks draw the same bits for different parts, or others for the same part.",
    "Calls and streams": "Gloo runs the program. NCCL refuses it, hangs, or reads too early.",
    "Files": "Ranks read and write a checkpoint without waiting for each other.",
    "Resumed data": "After a restart samples are read twice, or never.",
    "Resumed states": "After a restart the optimizer, a schedule, weights or generators differ.",
}
PROGRAMS = {
    "equal": "tests/equal/programs/",
    "check": "tests/check/planted/",
    "resume": "tests/resume/programs/",
}


@dataclass(frozen=True)
class Report:
    """A public report and its program.

    **Attributes**: `report` is "owner/repository#number", `tool` finds it ("equal", "check" or
    "resume") with `options` before the `program`, `says` is the bug and `means` its effect, `part`
    tells programs of one report apart, and `found` is False for a known miss.
    """

    report: str
    kind: str
    tool: str
    options: str
    program: str
    says: str
    means: str
    part: str = ""
    found: bool = True

    @property
    def command(self) -> str:
        """The command line, from the folder of the repository."""
        name = "torchrun" if self.tool == "check" else self.tool
        folder = "" if self.program.startswith("tests/") else PROGRAMS[self.tool]
        line = f"gpusim {name} {self.options} {folder}{self.program}"
        return line + (" --checkpoint {checkpoint}" if self.tool == "resume" else "")


SUMS, DRIFT, RANDOM, CALLS, FILES, DATA, STATES = KINDS
MEGATRON = "NVIDIA/Megatron-LM#7452"


def equal(
    report: str, kind: str, ranks: int, program: str, says: str, means: str, part: str = ""
) -> Report:
    return Report(report, kind, "equal", f"--ranks {ranks}", program, says, means, part)


def check(
    report: str,
    kind: str,
    options: str,
    program: str,
    says: str,
    means: str,
    found: bool = True,
) -> Report:
    return Report(report, kind, "check", options, program, says, means, found=found)


def resume(report: str, kind: str, program: str, says: str, means: str, load: int = 2) -> Report:
    options = f"--save-ranks 2 --load-ranks {load}"
    return Report(report, kind, "resume", options, program, says, means)


REPORTS: tuple[Report, ...] = (
    equal(
        MEGATRON,
        SUMS,
        2,
        "tensor_parallel.py --tp 2 --bug smoothing-not-reduced",
        "Label smoothing takes the mean over the vocabulary of the rank.",
        "The loss and its gradient depend on the number of tensor-parallel ranks.",
        "label smoothing",
    ),
    equal(
        MEGATRON,
        SUMS,
        2,
        "tensor_parallel.py --tp 2 --bug logits-gathered",
        "The head gathers its logits, and the loss takes them for shards of the vocabulary.",
        "The softmax counts each logit once for each rank.",
        "gathered logits",
    ),
    equal(
        MEGATRON,
        SUMS,
        4,
        "sequence_parallel.py --tp 2 --bug gathered-over-data",
        "A layer that is made without its group gathers the sequence over another group.",
        "Samples of other batches enter the layer.",
        "another group",
    ),
    equal(
        MEGATRON,
        SUMS,
        4,
        "dtensor_plan.py --tp 2 --bug head-norms-not-planned",
        "Norms that all heads share are not in the plan.",
        "Their gradients are those of the rank's heads alone.",
        "norms of heads",
    ),
    equal(
        MEGATRON,
        SUMS,
        2,
        "experts.py --bug balance-scaled",
        "The balancing loss of a mixture of experts is multiplied by the number of ranks.",
        "The router is pushed harder the more ranks there are.",
        "balancing loss",
    ),
    equal(
        "verl-project/verl#5625",
        SUMS,
        2,
        "data_parallel.py --bug microbatch-means",
        "The loss is the mean of the microbatches' means, whose numbers of tokens differ.",
        "Tokens of short microbatches weigh more.",
    ),
    check(
        "huggingface/transformers#34242",
        SUMS,
        "--ranks 4 --check=nccl --device cpu",
        "public_tokens_of_ranks.py",
        "Tokens are counted over microbatches, not over ranks, and DDP averages the ranks' means.",
        "Tokens of ranks with short samples weigh more.",
    ),
    check(
        "modelscope/FunASR#3472",
        SUMS,
        "--ranks 2 --check",
        "public_accumulation_index.py",
        "Another index than the step's decides on no_sync: the last microbatch is not reduced.",
        "Each rank steps with a gradient of its own.",
    ),
    check(
        "pytorch/pytorch#102435",
        SUMS,
        "--ranks 2 --check=nccl --device cpu",
        "public_copy_reduced.py",
        "The all-reduce gets the copy that `.cuda()` makes.",
        "The loss on the host stays that of the rank, and is logged as the mean.",
    ),
    equal(
        "NVIDIA/Megatron-LM#1446",
        SUMS,
        4,
        "tests/check/planted/public_final_norm.py",
        "With sequence parallelism the gradient of the final norm is not summed over the ranks.",
        "`--check` does not find it: which gradients are parts follows from the layout.",
    ),
    check(
        "pytorch/pytorch#98281",
        SUMS,
        "--ranks 2 --check",
        "public_ignored_parameters.py",
        "FSDP leaves out the parameters that it is told to ignore.",
        "`--check` does not find it: ignored parameters may be a rank's own on purpose.",
        found=False,
    ),
    check(
        "pytorch/torchtitan#166",
        DRIFT,
        "--ranks 2 --check=nccl --device cpu",
        "public_no_shard.py",
        "FSDP with NO_SHARD neither seeds nor broadcasts the weights.",
        "Each rank trains a model of its own with common gradients.",
    ),
    check(
        "pytorch/pytorch#136009",
        DRIFT,
        "--ranks 3 --check=nccl --device cpu",
        "public_scaler.py",
        "The rank's own GradScaler unscales gradients that DDP has reduced.",
        "The scales differ after a rank has resumed, and so do the weights.",
    ),
    check(
        "bigscience-workshop/Megatron-DeepSpeed#276",
        RANDOM,
        "--ranks 3 --check",
        "public_loader_seed.py",
        "The first tensor-parallel rank alone has a DataLoader, which draws a seed.",
        "Its dropout uses other bits than that of the ranks with the same activations.",
    ),
    check(
        "ecmwf/anemoi-core#595",
        RANDOM,
        "--ranks 4 --check=gloo",
        "public_model_group_seed.py",
        "All ranks of a model group have one seed, though each has a part of the grid.",
        "`--check` does not find it: the parts may be those of the data.",
        found=False,
    ),
    check(
        "facebookresearch/fairscale#1173",
        CALLS,
        "--ranks 2 --check=nccl",
        "public_master_weight.py",
        "The whole weight is gathered from transposed shards, which are not contiguous.",
        "NCCL raises an error.",
    ),
    check(
        "pytorch/pytorch#109401",
        CALLS,
        "--ranks 2 --check=nccl",
        "public_interleaved_sends.py",
        "Two pipeline stages post a receive before the send that the other side waits for.",
        "NCCL runs the calls of a pair in order, and hangs.",
    ),
    check(
        "gazingstars123/Anima-Standalone-Trainer#39",
        CALLS,
        "--ranks 3 --check=gloo",
        "public_transposed_early.py",
        "The result of an asynchronous gather is copied before the handle is waited for.",
        "The copy holds old values, new ones, or half of each.",
    ),
    check(
        "deepspeedai/DeepSpeed#7898",
        CALLS,
        "--ranks 2 --check=nccl --device cpu",
        "public_default_stream.py",
        "The stream of the reduction waits for the default stream, and not for the gradient's.",
        "Gradients are reduced before they are complete.",
    ),
    check(
        "pytorch/pytorch#84881",
        FILES,
        "--ranks 3 --check",
        "public_checkpoint_removed.py",
        "Rank 0 removes the checkpoint without waiting for the ranks that load it.",
        "`--check` does not find it: it looks for writes, and a removal is none.",
        found=False,
    ),
    resume(
        "PrimeIntellect-ai/prime-rl#1035",
        DATA,
        "prime_rl_1035.py --bug one-key",
        "The loaders' states of all ranks have one key in the checkpoint.",
        "All ranks go on with the samples of rank 0.",
    ),
    resume(
        "PrimeIntellect-ai/prime-rl#1092",
        DATA,
        "rank_files.py --bug rank-0-for-missing",
        "A rank without a file of the loader takes that of rank 0.",
        "On more ranks than before samples are read twice.",
        load=4,
    ),
    resume(
        "NVIDIA-NeMo/Megatron-Bridge#5637",
        DATA,
        "rank_files.py --bug files-dropped",
        "Fewer ranks read their own files of the loader, and drop the others.",
        "The samples that the other ranks had left are never read.",
        load=1,
    ),
    resume(
        "bghira/SimpleTuner#2986",
        DATA,
        "rank_files.py --bug rank-0-saves",
        "Rank 0 alone saves its shard of the sampler, and the others split anew.",
        "Samples are read twice, and others never.",
    ),
    resume(
        "bghira/SimpleTuner#2899",
        DATA,
        "rank_files.py --bug other-name",
        "A rank looks for another name than it has saved, and begins afresh.",
        "The epoch begins again.",
    ),
    resume(
        "NVIDIA/Megatron-LM#7413",
        DATA,
        "rank_files.py --bug name-of-replica",
        "Two ranks write the loader's state into one file.",
        "One of them goes on with the samples of the other.",
    ),
    resume(
        "pytorch/torchtitan#811",
        DATA,
        "torchtitan_811.py --bug dp-rank-keys",
        "Fewer ranks load their own keys of the loader, and drop the others.",
        "The samples that the other ranks had left are never read.",
        load=1,
    ),
    resume(
        "EleutherAI/gpt-neox#308",
        DATA,
        "mixed.py --bug micro-batches-not-counted",
        "The loader is forwarded by steps, and a step has several microbatches.",
        "Samples are read twice.",
    ),
    resume(
        "allenai/open-instruct#681",
        DATA,
        "ddp.py --bug skipped-in-each-epoch",
        "The batches before the resumed step are skipped in every later epoch.",
        "The same samples are missing in each epoch.",
    ),
    resume(
        "modelscope/ms-swift#10050",
        DATA,
        "ddp.py --bug set-epoch-forgotten",
        "The sampler is not told in which epoch the run resumes.",
        "The order is that of the first epoch: samples are read twice, and others never.",
    ),
    resume(
        "verl-project/verl#7401",
        DATA,
        "verl_7401.py --bug finished-loader",
        "A checkpoint at the end of an epoch holds a finished loader.",
        "The next epoch is skipped.",
    ),
    resume(
        "ByteDance-Seed/VeOmni#1189",
        STATES,
        "noise.py --bug generator-seeded-again",
        "The generator of the noise is seeded again.",
        "The noise of the first steps is replayed.",
    ),
    resume(
        "modelscope/ms-swift#9935",
        STATES,
        "noise.py --bug seeded-by-loader",
        "Random states are restored, and seeded again as a loader is built.",
        "The run draws the numbers of its start again.",
    ),
    resume(
        "huggingface/transformers#21390",
        STATES,
        "ddp.py --bug random-restored-before-loader",
        "Random states are restored before the loader's iterator draws from them.",
        "Dropout draws other bits than those of the uninterrupted run.",
    ),
    resume(
        "NVIDIA-NeMo/Megatron-Bridge#3832",
        STATES,
        "mixed.py --bug scaler-begun-again",
        "The GradScaler begins anew.",
        "The first steps after a restart may overflow and be skipped.",
    ),
    resume(
        "pytorch/torchtitan#4598",
        STATES,
        "fsdp2.py --bug learning-rate-of-construction",
        "The scheduler is restored, and the learning rates of the groups are not.",
        "The next step has the learning rate of the start.",
    ),
    resume(
        "KempnerInstitute/KempnerForge#115",
        STATES,
        "fsdp2.py --bug raw-optimizer-state",
        "The state of the fresh optimizer is empty, so that dcp.load fills nothing.",
        "Adam's moments are zero again.",
    ),
    resume(
        "NVIDIA/Megatron-LM#7468",
        STATES,
        "mixed.py --bug weight-decay-of-construction",
        "The weight decay of the groups is that of the construction.",
        "A schedule of the weight decay begins again.",
    ),
    resume(
        "pytorch/torchtitan#275",
        STATES,
        "ddp.py --bug warmup-begun-again",
        "The scheduler is not loaded.",
        "The warm-up begins again.",
    ),
    resume(
        "pytorch/torchtitan#291",
        STATES,
        "tensor_parallel.py --bug local-tensors",
        "Local tensors of all ranks are saved under one name.",
        "All ranks load the shard of one of them.",
    ),
)
