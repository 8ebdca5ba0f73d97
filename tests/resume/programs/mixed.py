"""DDP with gradient accumulation, autocast, a GradScaler, and an average of the weights."""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

BUGS = (
    # https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3832: the GradScaler begins anew.
    "scaler-begun-again",
    # The average is not saved, and begins anew from the loaded weights.
    "average-begun-again",
    # The average is saved, but without its count: the next step overwrites it by the weights.
    "average-without-count",
    # https://github.com/EleutherAI/gpt-neox/pull/308: the loader is forwarded by steps, as if
    # a step had one micro batch.
    "micro-batches-not-counted",
    # A save after some micro batches: what they had added to the gradients is lost.
    "gradients-in-progress",
    # https://github.com/NVIDIA/Megatron-LM/pull/7468: the weight decay in the groups is set anew.
    "weight-decay-of-construction",
)
DECAY = (0.0, 0.2)


def main() -> None:
    options = common.options(*BUGS, samples=48, micro=4)
    rank, ranks = common.start()
    model = DistributedDataParallel(common.network())
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=DECAY[0])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    parts = options.micro // ranks  # micro batches of a rank in a step: 4 in all
    step, begun = 0, 0
    if path := common.newest(options.checkpoint):
        state = torch.load(path / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        if wrong("weight-decay-of-construction"):
            optimizer.param_groups[0]["weight_decay"] = DECAY[0]
        if not wrong("scaler-begun-again"):
            scaler.load_state_dict(state["scaler"])
        if wrong("average-begun-again"):
            average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        elif wrong("average-without-count"):
            average.module.load_state_dict(state["average"])
        else:
            average.load_state_dict(state["average"])
        step, begun = state["step"], state["begun"]
    size = GLOBAL_BATCH // options.micro
    per_step = 1 if wrong("micro-batches-not-counted") else parts
    sampler = common.Consumed(options.samples, step * GLOBAL_BATCH, rank, ranks)
    order = iter(sampler)
    batches = (batch[i : i + size] for batch in order for i in range(0, len(batch), size))
    for _ in range(begun):
        next(batches)
    if per_step != parts:  # forwarded from the beginning of the data, by too little
        sampler.consumed = step * GLOBAL_BATCH // parts
    indices: list[int] = []
    losses = torch.zeros(())
    for number, (x, y, index) in enumerate(
        DataLoader(common.Samples(options.samples), batch_sampler=batches), begun
    ):
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(model(x), y) / parts
        scaler.scale(loss).backward()
        losses += loss.detach()
        indices += index.tolist()
        if wrong("gradients-in-progress") and step + 1 == options.save_every and parts > 1:
            if number % parts == 0:  # after the first micro batch of the step
                save(options, step, 1, model, average, optimizer, scaler)
        if (number + 1) % parts:
            continue
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model.module)
        step += 1
        optimizer.param_groups[0]["weight_decay"] = DECAY[step > 2]
        common.report(
            step, indices, losses, scale=scale, average=common.digest(average.parameters())
        )
        indices, losses = [], torch.zeros(())
        if step % options.save_every == 0 and not wrong("gradients-in-progress"):
            save(options, step, 0, model, average, optimizer, scaler)
        if step == options.steps:
            break
    dist.destroy_process_group()


def save(options, step, begun, model, average, optimizer, scaler) -> None:
    path = common.begin(options.checkpoint, step)
    own = average.module if wrong("average-without-count") else average
    state = {"model": model.module.state_dict(), "average": own.state_dict()}
    state |= {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
    if dist.get_rank() == 0:
        torch.save({**state, "step": step, "begun": begun}, path / "state.pt")
    common.finish(path)


if __name__ == "__main__":
    main()
