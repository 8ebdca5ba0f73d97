"""DeepSpeed's ZeRO on its CPU accelerator: each stage, accumulation, float32 or bfloat16."""

import argparse
import os
from typing import Any

import digest
import torch
import torch.distributed as dist
from torch import nn

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed

BATCH, ACCUMULATED, WIDTH, CLASSES = 4, 2, 16, 8


def settings(stage: int, bf16: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "steps_per_print": 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    digest.watch()
    deepspeed.init_distributed("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 40), nn.Linear(40, CLASSES)
    )
    inputs = torch.randn(args.steps * ACCUMULATED, ranks, BATCH, WIDTH)
    targets = inputs[..., :CLASSES].argmax(-1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config=settings(args.stage, args.bf16),
    )
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    losses = []
    for x, y in zip(inputs[:, rank].to(dtype), targets[:, rank], strict=True):
        loss = nn.functional.cross_entropy(engine(x).float(), y)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / ranks)
    digest.say("losses", losses)
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=args.stage == 3):
        digest.model(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
