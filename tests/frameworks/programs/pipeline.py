"""The schedules of torch.distributed.pipelining on stages of a decoder."""

import argparse
from itertools import pairwise

import digest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

MICROBATCHES = 8  # or one for each rank, if they are more


def stage_of(index: int, stages: int, layers: int) -> PipelineStage:
    """Cut one stage out of the whole decoder, which every rank makes from the same seed."""
    torch.manual_seed(0)
    model = tiny.Decoder(layers=layers)
    bounds = list(pairwise(layers * n // stages for n in range(stages + 1)))
    mine = range(*bounds[index])
    for name in list(model.blocks):
        if int(name) not in mine:
            del model.blocks[name]
    if index > 0:
        model.tokens = None
    if index < stages - 1:
        model.norm = model.head = None
    return PipelineStage(model, index, stages, torch.device("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("schedule")
    options = parser.parse_args()
    digest.watch()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind = get_schedule_class(options.schedule)
    count = max(MICROBATCHES, ranks)
    several = issubclass(kind, PipelineScheduleMulti)
    if several:
        stages = 2 * ranks
        folded = options.schedule in ("ZBVZeroBubble", "DualPipeV")  # the last stage is rank 0's
        own = [rank, stages - 1 - rank if folded else rank + ranks]
        parts = [stage_of(each, stages, stages) for each in own]
        schedule = kind(parts, count, loss_fn=tiny.loss)
    else:
        own = [rank]
        parts = [stage_of(rank, ranks, ranks)]
        schedule = kind(parts[0], count, loss_fn=tiny.loss)
    parameters = [each for part in parts for each in part.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    last = (2 * ranks if several else ranks) - 1
    for step in range(10):
        inputs, targets = tiny.text(step, batch=count)
        losses: list[torch.Tensor] = []
        mine = {"target": targets, "losses": losses} if last in own else {}
        schedule.step(*((inputs,) if 0 in own else ()), **mine)
        optimizer.step()
        optimizer.zero_grad()
        if last in own:
            digest.say("loss", torch.stack(losses).mean())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
