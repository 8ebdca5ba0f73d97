"""The planted pairs: ordinary training programs, with one edit each, and some without."""

from __future__ import annotations

from typing import Any

from tests.compare.pair import Effect, Made, Pair

__all__ = ["MISSED", "PAIRS"]

GLOO = Made(real=True)


def optimizer(name: str, says: str, program: str, nth: int = 0, **edit: str) -> Pair:
    """An edit of how weights are updated, which shows in the step that follows."""
    return Pair(name, says, program, ("optimizer",), edit, Effect("update", nth))


def real(pair: Pair, **more: Any) -> Pair:
    """The same, with run a by real processes of gloo."""
    return Pair(**{**vars(pair), "a": GLOO, **more})


def equal(name: str, says: str, program: str, **more: Any) -> Pair:
    return Pair(name, says, program, **more)


def rounding(name: str, says: str, program: str, a: Made, b: Made) -> Pair:
    return Pair(name, says, program, ("rounding",), a=a, b=b)


BY_HAND = (
    optimizer("rate", "the learning rate is doubled", "by_hand.py", rate="rate = 0.2"),
    real(
        optimizer(
            "rate-from-step-2",
            "the learning rate drops from step 2 on",
            "by_hand.py",
            2,
            update="w -= (rate if step < 2 else rate / 10) * g",
        )
    ),
    Pair(
        "one-gradient-tripled",
        "rank 1 brings three times its gradient",
        "by_hand.py",
        ("scaled",),
        {"gradient": "g = (error.T @ x) / len(x) * (3 if rank == 1 else 1)"},
        Effect("gradient", ranks=(1,)),
        claims={"ranks": [1]},
    ),
    Pair(
        "sum-for-mean",
        "the summed gradient is not divided",
        "by_hand.py",
        ("optimizer",),
        {"mean": ""},
        Effect("mean"),
    ),
    Pair(
        "sum-skipped",
        "step 2 does not sum its gradients",
        "by_hand.py",
        ("missing",),
        {"sum": "if step != 2:\n    dist.all_reduce(g)"},
        Effect("sum", 2),
    ),
    Pair(
        "sum-twice",
        "gradients are summed twice",
        "by_hand.py",
        ("doubled",),
        {"sum": "dist.all_reduce(g)\ndist.all_reduce(g)"},
        Effect("sum"),
    ),
    Pair(
        "average-twice",
        "the all-reduce averages, and the mean divides again",
        "by_hand.py",
        ("factor",),
        {"sum": "dist.all_reduce(g, op=dist.ReduceOp.AVG)"},
        Effect("sum"),
        claims={"factor": 0.25},
    ),
    Pair(
        "nan-of-one-rank",
        "rank 2 has a NaN in step 1",
        "by_hand.py",
        ("data",),
        {
            "gradient": "g = (error.T @ x) / len(x)\nif rank == 2 and step == 1:\n"
            "    g[0, 0] = torch.nan"
        },
        Effect("gradient", 1, (2,)),
        claims={"ranks": [2]},
    ),
    Pair(
        "weights-of-one-rank",
        "rank 3 starts with other weights",
        "by_hand.py",
        ("data",),
        {"weights": "w = torch.linspace(-1, 1, 48).reshape(6, 8) + 0.01 * (rank == 3)"},
        Effect("weights", ranks=(3,)),
        claims={"ranks": [3]},
    ),
    rounding(
        "gloo-and-nccl", "another order of the sums", "by_hand.py", GLOO, Made(4, "nccl-ring")
    ),
    rounding(
        "wide-sums",
        "sums in float64",
        "by_hand.py",
        Made(4, "linear"),
        Made(4, "linear accumulate=float64"),
    ),
    equal("as-gloo", "the same sums as gloo's", "by_hand.py", a=GLOO),
    equal(
        "two-members",
        "two members have one order",
        "by_hand.py",
        a=Made(2, "linear"),
        b=Made(2, "nccl-ring"),
    ),
)

GLOBAL_BATCH = {
    "data": "x = torch.randn(48, 16, generator=torch.Generator().manual_seed(step))[rank::size]"
}
DDP = (
    real(
        optimizer(
            "decay",
            "the weight decay is doubled",
            "ddp.py",
            settings="rate, momentum, decay = 0.05, 0.9, 0.02",
        )
    ),
    optimizer(
        "momentum",
        "another momentum, which acts from the second step on",
        "ddp.py",
        1,
        settings="rate, momentum, decay = 0.05, 0.8, 0.01",
    ),
    optimizer(
        "schedule",
        "the scheduler decays less, from step 2 on",
        "ddp.py",
        2,
        scheduler="scheduler = StepLR(optimizer, 2, gamma=0.9)",
    ),
    Pair(
        "shared-seed",
        "rank 3 draws the data of rank 2",
        "ddp.py",
        ("data",),
        {"seed": "draws = torch.Generator().manual_seed(min(rank, 2))"},
        Effect("data", ranks=(3,)),
        claims={"ranks": [3]},
    ),
    Pair(
        "weights-drawn-otherwise",
        "another seed of the weights",
        "ddp.py",
        ("data",),
        {"init": "torch.manual_seed(1)"},
        Effect("init"),
    ),
    Pair(
        "gradient-after-backward",
        "rank 2 scales its gradients after DDP has averaged them",
        "ddp.py",
        ("optimizer",),
        {
            "backward": "loss.backward()\nif rank == 2:\n    for p in model.parameters():\n"
            "        p.grad *= 1.5"
        },
        Effect("backward", ranks=(2,)),
        claims={"ranks": [2]},
    ),
    Pair(
        "two-and-four",
        "the same global batches on more ranks",
        "ddp.py",
        ("rounding",),
        a=Made(2),
        b=Made(4),
        both=GLOBAL_BATCH,
    ),
    Pair(
        "two-and-four-scaled-rate",
        "the learning rate grows with the ranks",
        "ddp.py",
        ("optimizer",),
        effect=Effect("update"),
        a=Made(2),
        b=Made(4),
        both={**GLOBAL_BATCH, "settings": "rate, momentum, decay = 0.05 * size, 0.9, 0.01"},
    ),
    equal("ddp-as-gloo", "the same sums as gloo's", "ddp.py", a=GLOO),
)

BUCKETS = (
    Pair(
        "smaller-buckets",
        "a smaller bucket_cap_mb",
        "buckets.py",
        ("buckets",),
        {"buckets": "megabytes, unused = 0.001, False"},
        Effect("wrap"),
    ),
    Pair(
        "one-bucket",
        "the default bucket_cap_mb",
        "buckets.py",
        ("buckets",),
        {"buckets": "megabytes, unused = 25, False"},
        Effect("wrap"),
        a=GLOO,
    ),
    Pair(
        "frozen-layer",
        "the last layer is frozen",
        "buckets.py",
        ("other",),
        {"frozen": "trained = 4"},
        Effect("frozen"),
    ),
    Pair(
        "unused-parameters",
        "find_unused_parameters, with which DDP cuts buckets in the first step already",
        "buckets.py",
        ("buckets", "additional"),
        {"buckets": "megabytes, unused = 0.01, True"},
        Effect("wrap"),
    ),
)

ACCUMULATE = (
    Pair(
        "not-divided-by-micro-batches",
        "the loss is not divided by the micro-batches",
        "accumulate.py",
        ("factor",),
        {"backward": "loss.backward()"},
        Effect("backward"),
        claims={"factor": 4.0},
    ),
    Pair(
        "divided-by-ranks",
        "the loss is divided by the ranks, too",
        "accumulate.py",
        ("factor",),
        {"backward": "(loss / micro / size).backward()"},
        Effect("backward"),
        a=GLOO,
        claims={"factor": 0.25},
    ),
    Pair(
        "no-sync-forgotten",
        "each micro-batch is reduced",
        "accumulate.py",
        ("additional",),
        {"last": "last = True"},
        Effect("last"),
    ),
    rounding(
        "gloo-and-tree", "another order of the sums", "accumulate.py", GLOO, Made(4, "nccl-tree")
    ),
    equal(
        "refactored",
        "lines that compute the same",
        "accumulate.py",
        edit={"backward": "share = loss / micro\nshare.backward()", "last": "last = part == 3"},
    ),
)

HOOK = (
    Pair(
        "sums-in-bfloat16",
        "the hook sums in bfloat16",
        "hook.py",
        ("cast",),
        {
            "divide": "values = (bucket.buffer() / dist.get_world_size()).bfloat16()",
            "back": "return work.get_future().then(lambda w: bucket.buffer().copy_(w.value()[0]))",
        },
        Effect("divide"),
    ),
    Pair(
        "gradients-through-bfloat16",
        "gradients are rounded to bfloat16, and summed in float32",
        "hook.py",
        ("cast",),
        {"divide": "values = (bucket.buffer() / dist.get_world_size()).bfloat16().float()"},
        Effect("divide"),
        a=GLOO,
        claims={"dtype": "bfloat16"},
    ),
    Pair(
        "hook-that-does-not-divide",
        "the hook does not divide",
        "hook.py",
        ("factor",),
        {"divide": "values = bucket.buffer()"},
        Effect("divide"),
        claims={"factor": 4.0},
    ),
    Pair(
        "barrier",
        "a barrier is left out",
        "hook.py",
        ("missing",),
        {"barrier": ""},
        Effect("barrier"),
    ),
)

SHARDED = (
    Pair(
        "clipped-less",
        "another largest norm",
        "sharded.py",
        ("optimizer",),
        {"clip": "norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)"},
        Effect("clip"),
    ),
    Pair(
        "beta",
        "another beta of Adam",
        "sharded.py",
        ("optimizer",),
        {"betas": "betas = (0.7, 0.99)"},
        Effect("update"),
    ),
    Pair(
        "bfloat16-parameters",
        "a policy of mixed precision",
        "sharded.py",
        ("cast",),
        {"policy": "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)"},
        Effect("policy"),
    ),
    rounding(
        "sharded-and-tree", "another order of the sums", "sharded.py", Made(), Made(4, "linear")
    ),
    equal("fsdp-as-gloo", "the same sums as gloo's", "sharded.py", a=GLOO),
)

PARALLEL = (
    Pair(
        "rate-of-one-rank",
        "rank 1 updates its part with another learning rate",
        "zero.py",
        ("optimizer", "data"),
        {"settings": "rate, decay = 0.01 * (1 + (rank == 1)), 0.0"},
        Effect("update", ranks=(1,)),
        claims={"ranks": [1]},
    ),
    Pair(
        "activations-through-bfloat16",
        "activations are rounded to bfloat16",
        "tensor_parallel.py",
        ("cast", "rounding"),
        {"hidden": "hidden = torch.relu(self.up(self.norm(x))).bfloat16().float()"},
        Effect("hidden"),
    ),
    Pair(
        "halved-shard",
        "rank 2 halves its part of the activations; a bias is added to it",
        "tensor_parallel.py",
        ("scaled", "data"),
        {"hidden": "hidden = torch.relu(self.up(self.norm(x))) / (1 + (dist.get_rank() == 2))"},
        Effect("hidden", ranks=(2,)),
        claims={"ranks": [2]},
    ),
    Pair(
        "stage-not-divided",
        "the last stage does not divide its loss by the micro-batches",
        "pipeline.py",
        ("scaled", "factor"),
        {"loss": "loss = (y - 0.5).square().mean()"},
        Effect("loss", ranks=(3,)),
        claims={"factor": 2.0},
    ),
    Pair(
        "message-through-bfloat16",
        "stage 1 sends activations that are rounded to bfloat16",
        "pipeline.py",
        ("cast",),
        {"out": "out = y.detach()\nif rank == 1:\n    out = out.bfloat16().float()"},
        Effect("out", ranks=(1,)),
        claims={"dtype": "bfloat16"},
    ),
)

MIXED = (
    Pair(
        "scale",
        "another scale of the loss",
        "mixed.py",
        ("factor",),
        {"scaler": 'scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)'},
        Effect("backward"),
        claims={"factor": 4.0},
    ),
    Pair(
        "autocast-off",
        "autocast is switched off",
        "mixed.py",
        ("cast", "rounding"),
        {"narrow": "narrow = False"},
        Effect("forward"),
    ),
    Pair(
        "clipping",
        "another largest norm",
        "mixed.py",
        ("optimizer",),
        {"limit": "limit = 1.0"},
        Effect("clip"),
        a=GLOO,
    ),
)

DATA = (
    Pair(
        "set-epoch",
        "set_epoch is not called",
        "epochs.py",
        ("permuted", "data"),
        {"epoch": ""},
        Effect("forward", 3),
        a=GLOO,
    ),
    Pair(
        "ranks-swapped",
        "ranks read one another's samples",
        "epochs.py",
        ("permuted",),
        {"turn": "turn = size - 1 - rank"},
        Effect("turn"),
        claims={"sources": {"0": 3, "1": 2, "2": 1, "3": 0}},
    ),
    Pair(
        "last-batch-dropped",
        "the last batch, an uneven one, is dropped",
        "epochs.py",
        ("missing",),
        {"loader": "loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)"},
        Effect("forward", 2, other=("sums", 0)),
    ),
    Pair(
        "dropout-off",
        "no dropout",
        "average.py",
        ("data",),
        {"layers": "model = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 2))"},
        Effect("forward"),
    ),
    Pair(
        "dropout-seed",
        "all ranks draw from one seed",
        "average.py",
        ("data",),
        {"dropout": "torch.manual_seed(90)"},
        Effect("dropout", ranks=(1, 2, 3)),
        claims={"ranks": [1, 2, 3]},
    ),
    Pair(
        "statistics-of-each-rank",
        "the moments of a batch are not summed",
        "norm.py",
        ("missing",),
        {"statistics": ""},
        Effect("statistics"),
    ),
    Pair(
        "running-mean",
        "the running mean follows faster",
        "norm.py",
        ("optimizer", "data"),
        {"kept": "self.kept.lerp_(mean.detach(), 0.2)"},
        Effect("kept"),
    ),
    Pair(
        "tokens-of-one-rank",
        "rank 2 has other tokens from step 1 on",
        "experts.py",
        ("data",),
        {
            "choice": "if rank == 2 and step:\n    x[3] += 0.01\n"
            "weight, choice = router(x).softmax(1).max(1)"
        },
        Effect("choice", 1, (2,)),
        claims={"ranks": [2]},
    ),
)

COUNTS = (
    Pair(
        "lengths-swapped",
        "two ranks draw as many samples as the other one did, of their own data",
        "counts.py",
        ("data",),
        {"lengths": "lengths = [8, 4, 6, 2]"},
        Effect("count", ranks=(0, 1)),
    ),
    Pair(
        "half-a-batch",
        "rank 1 loses half of a batch",
        "counts.py",
        ("data",),
        {"count": "count = lengths[(rank + step) % size] // (1 + (rank == 1 and step == 1))"},
        Effect("count", 1, (1,)),
        claims={"ranks": [1]},
    ),
    Pair(
        "mean-of-own-samples",
        "each rank divides by its own samples",
        "counts.py",
        ("factor",),
        {"loss": "loss = (model(x) - x[:, :2]).square().sum() / count"},
        Effect("loss"),
    ),
    Pair(
        "logged-before",
        "the loss is logged before the gradients are summed",
        "by_hand.py",
        ("other",),
        {
            "sum": "loss = error.square().mean()\ndist.all_reduce(loss)\ndist.all_reduce(g)",
            "log": "",
        },
        Effect("sum"),
    ),
)

PAIRS = (*COUNTS, *BY_HAND, *DDP, *BUCKETS, *ACCUMULATE, *HOOK, *SHARDED, *PARALLEL, *MIXED, *DATA)

MISSED: dict[str, str] = {}
"""Pairs whose class is not found, with the reason."""
