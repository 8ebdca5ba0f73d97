"""The programs of `gpusim resume`: with a bug, and correct."""

from __future__ import annotations

from tests.resume.case import Case

__all__ = ["BUGS", "CORRECT", "LIBRARIES"]

P = "https://github.com/"


def bug(
    program: str,
    at: str,
    says: str,
    source: str = "common",
    save: tuple[int, ...] = (2,),
    load: tuple[int, ...] = (2,),
    refused: tuple[tuple[int, int], ...] = (),
    same: tuple[tuple[int, int], ...] = (),
    stop: int = 4,
) -> Case:
    """A case with a bug: all pairs but those of `refused` and `same` differ."""
    pairs = {(first, second) for first in save for second in load}
    wrong = frozenset(pairs - set(refused) - set(same))
    source = f"{P}{source}" if "/" in source else source
    refusals = frozenset(refused)
    return Case(program, save, load, wrong, refusals, tuple(at.split()), source, says, stop=stop)


BUGS = (
    bug(
        "prime_rl_1035.py --bug one-key",
        "data",
        "The loader's state of each rank is under one key of DCP: all ranks load rank 0's",
        "PrimeIntellect-ai/prime-rl/pull/1035",
    ),
    bug(
        "rank_files.py --bug rank-0-for-missing",
        "data",
        "A rank without a file of the loader takes rank 0's",
        "PrimeIntellect-ai/prime-rl/pull/1092",
        load=(1, 2, 4),
        same=((2, 2),),
    ),
    bug(
        "rank_files.py --bug files-dropped",
        "data",
        "Fewer ranks read their own files of the loader, and drop the others",
        "NVIDIA-NeMo/Megatron-Bridge/pull/5637",
        load=(1, 2, 4),
        same=((2, 2),),
        refused=((2, 4),),
    ),
    bug(
        "rank_files.py --bug rank-0-saves",
        "data",
        "Rank 0 alone saves its shard of the sampler; the others split anew",
        "bghira/SimpleTuner/pull/2986",
    ),
    bug(
        "rank_files.py --bug other-name",
        "data",
        "A rank looks for another name than it saved, and begins afresh",
        "bghira/SimpleTuner/pull/2899",
    ),
    bug(
        "rank_files.py --bug name-of-replica",
        "data",
        "Two ranks write the loader's state into one file",
        "NVIDIA/Megatron-LM/pull/7413",
    ),
    bug(
        "torchtitan_811.py --bug dp-rank-keys",
        "data",
        "Loaded by fewer ranks, the loader's other keys are dropped in silence",
        "pytorch/torchtitan/issues/811",
        save=(2,),
        load=(1, 2, 4),
        same=((2, 2),),
        refused=((2, 4),),
    ),
    bug(
        "noise.py --bug generator-seeded-again",
        "random",
        "The generator of the noise is seeded again: the noise is replayed",
        "ByteDance-Seed/VeOmni/pull/1189",
    ),
    bug(
        "noise.py --bug seeded-by-loader",
        "random",
        "Random states are restored, and then seeded again as a loader is built",
        "modelscope/ms-swift/pull/9935",
    ),
    bug(
        "mixed.py --bug scaler-begun-again",
        "scaler",
        "The GradScaler begins anew",
        "NVIDIA-NeMo/Megatron-Bridge/pull/3832",
    ),
    bug(
        "fsdp1.py --bug steps-of-adam-lost",
        "optimizer",
        "Adam's count of steps begins anew",
        "NVIDIA-NeMo/Megatron-Bridge/pull/3832",
    ),
    bug(
        "fsdp2.py --bug learning-rate-of-construction",
        "groups",
        "The scheduler is restored, the learning rates of the groups are not",
        "pytorch/torchtitan/pull/4598",
    ),
    bug(
        "fsdp2.py --bug raw-optimizer-state",
        "optimizer",
        "The fresh optimizer's state is empty: dcp.load fills no moments",
        "KempnerInstitute/KempnerForge/pull/115",
    ),
    bug(
        "mixed.py --bug weight-decay-of-construction",
        "groups",
        "The weight decay of the groups is that of the construction",
        "NVIDIA/Megatron-LM/pull/7468",
    ),
    bug(
        "mixed.py --bug micro-batches-not-counted",
        "data",
        "The loader is forwarded by steps, a step has several micro batches",
        "EleutherAI/gpt-neox/pull/308",
    ),
    bug(
        "ddp.py --bug skipped-in-each-epoch",
        "data steps",
        "The batches before the resumed step are skipped in every epoch",
        "allenai/open-instruct/pull/681",
    ),
    bug(
        "ddp.py --bug warmup-begun-again",
        "groups scheduler",
        "The scheduler is not loaded: the warm-up begins again",
        "pytorch/torchtitan/pull/275",
    ),
    bug(
        "ddp.py --bug set-epoch-forgotten",
        "data",
        "set_epoch is not called for the epoch in which the run resumes",
        "modelscope/ms-swift/issues/10050",
    ),
    bug(
        "ddp.py --bug random-restored-before-loader",
        "random",
        "Random states are restored before iter() of the loader draws",
        "huggingface/transformers/pull/21390",
    ),
    bug("ddp.py --bug dropout-of-rank-0", "random", "All ranks load the generators of rank 0"),
    bug("ddp.py --bug random-not-restored", "random", "The generators are not restored"),
    bug("ddp.py --bug epoch-begun-again", "data steps", "The epoch in progress begins again"),
    bug(
        "ddp.py --bug module-prefix",
        "weights",
        "Names begin with 'module.', and strict=False loads none of them",
    ),
    bug(
        "ddp.py --bug off-by-one",
        "weights optimizer data random steps",
        "The checkpoint is written before the optimizer's step, with the number of the next",
    ),
    bug("ddp.py --bug optimizer-not-loaded", "optimizer", "The optimizer's state is not loaded"),
    bug("fsdp2.py --bug not-set-back", "weights", "dcp.load fills a copy that is not set back"),
    bug("fsdp2.py --bug weights-in-bfloat16", "weights", "Weights are saved without masters"),
    bug(
        "fsdp2.py --bug consumed-by-ranks",
        "data",
        "Consumed samples are steps times a batch for each rank",
        load=(1, 2, 4),
        same=((2, 2),),
    ),
    bug("fsdp1.py --bug shard-of-rank-0", "optimizer", "All ranks load rank 0's shard of Adam"),
    bug(
        "fsdp1.py --original 1",
        "optimizer",
        "FSDP1, use_orig_params, on the CPU: optim_state_dict gives exp_avg_sq as exp_avg",
    ),
    bug(
        "zero.py --bug part-of-rank-0",
        "optimizer",
        "Rank 0's part of the ZeRO optimizer is loaded by each rank",
    ),
    bug("zero.py --bug loaded-by-rank-0", "optimizer", "Rank 0 alone loads the optimizer"),
    bug(
        "tensor_parallel.py --bug local-tensors",
        "weights",
        "Local tensors of all ranks are saved under one name",
        "pytorch/torchtitan/issues/291",
    ),
    bug("mixed.py --bug average-begun-again", "weights", "The average of weights is not saved"),
    bug(
        "mixed.py --bug average-without-count",
        "weights buffers",
        "The average is saved without its count, and overwritten",
    ),
    bug(
        "mixed.py --bug gradients-in-progress",
        "weights data",
        "A save between micro batches loses their gradients",
        stop=3,
    ),
    bug("names.py --bug compiled-prefix", "weights", "'_orig_mod.' and strict=False: none loaded"),
    bug("names.py --bug tied-once", "weights", "Tied weights are loaded into one of them"),
    bug(
        "names.py --bug order-of-set",
        "optimizer",
        "The order of the parameters in the optimizer differs after a restart",
    ),
    bug(
        "batch_norm.py --bug statistics-of-rank-0",
        "buffers",
        "Rank 0's running statistics are loaded by all ranks",
    ),
    bug(
        "verl_7401.py --bug finished-loader",
        "data steps",
        "From a checkpoint at an epoch's end the next epoch is skipped",
        "verl-project/verl/issues/7401",
        stop=3,
    ),
)

ALL = (1, 2, 4)
CORRECT = (
    Case("ddp.py"),
    Case("ddp.py --skip read"),
    Case("ddp.py --dropout 0.0", ALL, ALL),
    Case("ddp.py --dropout 0.0 --skip read", ALL, ALL),
    Case("ddp.py --dropout 0.0 --samples 30", (2, 4), (2, 4)),
    Case("ddp.py --samples 64 --save-every 3", stop=3),
    Case("prime_rl_1035.py", refused=frozenset({(2, 4)}), load=(2, 4)),
    Case("rank_files.py", (2, 4), ALL),
    Case("torchtitan_811.py", load=ALL, refused=frozenset({(2, 1), (2, 4)})),
    Case("noise.py"),
    Case("noise.py --dropout 0.0", ALL, ALL),
    Case("fsdp2.py", ALL, ALL),
    Case("fsdp2.py --steps 12 --save-every 5", (2,), (2, 4), stop=5),
    Case("fsdp1.py", (2, 4), (2, 4)),
    Case("zero.py", (1, 2), ALL),
    Case("tensor_parallel.py", (2, 4), ALL),
    Case("mixed.py", ALL, ALL),
    Case("mixed.py --micro 8", (2,), (2, 4)),
    Case("names.py", (1, 2), (1, 2)),
    Case("names.py --compiled 1", (2,), (2,)),
    Case("batch_norm.py", (2,), (2,)),
    Case("batch_norm.py --broadcast 1", (2,), (2,)),
    Case("verl_7401.py", (2,), (1, 2, 4), stop=3),
    Case("verl_7401.py --save-every 4", (2,), (2, 4)),
)

#: Programs of accelerate and torchdata, for the environment of `make frameworks`.
LIBRARIES = (
    Case("with_accelerate.py", load=(2, 4)),
    bug(
        "with_accelerate.py --bug epoch-not-set",
        "data",
        "A fresh loader is skipped as if it were in its first epoch",
        "huggingface/accelerate/issues/2016",
    ),
    bug(
        "with_accelerate.py --bug scheduler-not-registered",
        "groups scheduler",
        "The scheduler is neither prepared nor registered",
    ),
    Case("with_torchdata.py"),
    bug(
        "with_torchdata.py --bug loader-not-saved",
        "data",
        "The loader's state is not saved",
        "pytorch/torchtitan/issues/291",
    ),
    bug(
        "with_torchdata.py --bug order-not-restored",
        "data",
        "The loader's position is restored, and its order is not",
        "huggingface/accelerate/issues/4195",
    ),
)
