"""DDP with a DistributedSampler, AdamW, warm-up and dropout.

Rank 0 saves the model, and each rank its generators.

`--skip read` skips the epoch's first batches by reading them. `--dropout 0` draws no random numbers
and restores none, so that any number of ranks may resume.
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

BUGS = (
    "dropout-of-rank-0",
    "epoch-begun-again",
    "module-prefix",
    "off-by-one",
    "optimizer-not-loaded",
    "random-not-restored",
    "random-restored-before-loader",
    "set-epoch-forgotten",
    "skipped-in-each-epoch",
    "warmup-begun-again",
)


class From(DistributedSampler):
    """A DistributedSampler that begins an epoch at a sample."""

    first = 0

    def __iter__(self):
        indices = list(super().__iter__())[self.first :]
        self.first = 0
        return iter(indices)


def save(folder, step: int, model: nn.Module, optimizer, scheduler) -> None:
    path = common.begin(folder, step)
    own = model if wrong("module-prefix") else model.module
    state = {"model": own.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"scheduler": scheduler.state_dict(), "step": step}
    if dist.get_rank() == 0:
        torch.save(state, path / "state.pt")
    torch.save(common.random_states(), path / f"random-{dist.get_rank()}.pt")
    common.finish(path)


def main() -> None:
    options = common.options(*BUGS, dropout=0.2, samples=24, skip="sampler")
    rank, ranks = common.start()
    data = common.Samples(options.samples)
    sampler = From(data, ranks, rank, seed=3, drop_last=True)
    loader = DataLoader(data, GLOBAL_BATCH // ranks, sampler=sampler, drop_last=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(common.network(options.dropout))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 6))
    torch.manual_seed(rank)  # each rank drops other units
    step, states = 0, None
    if path := common.newest(options.checkpoint):
        state = torch.load(path / "state.pt")
        # DDP's names begin with 'module.', and strict=False loads none of them.
        model.module.load_state_dict(state["model"], strict=not wrong("module-prefix"))
        if not wrong("optimizer-not-loaded"):
            optimizer.load_state_dict(state["optimizer"])
        if not wrong("warmup-begun-again"):  # https://github.com/pytorch/torchtitan/pull/275
            scheduler.load_state_dict(state["scheduler"])
        step = state["step"]
        if options.dropout and not wrong("random-not-restored"):
            owner = 0 if wrong("dropout-of-rank-0") else rank
            states = torch.load(path / f"random-{owner}.pt")
    per_epoch = options.samples // GLOBAL_BATCH
    resumed = step
    while step < options.steps:
        epoch, skipped = divmod(step, per_epoch)
        if wrong("epoch-begun-again"):  # the epoch is known, the batch within it is not
            skipped = 0
        if wrong("skipped-in-each-epoch"):  # https://github.com/allenai/open-instruct/pull/681
            skipped = resumed % per_epoch
        if not (wrong("set-epoch-forgotten") and step == resumed):
            sampler.set_epoch(epoch)
        if options.skip == "sampler":
            sampler.first = skipped * (GLOBAL_BATCH // ranks)
        if states and wrong("random-restored-before-loader"):
            # https://github.com/huggingface/transformers/pull/21390: iter() draws a seed.
            common.set_random_states(states)
        batches = iter(loader)
        if options.skip == "read":
            for _ in range(skipped):
                next(batches)
        if states and not wrong("random-restored-before-loader"):
            common.set_random_states(states)
        states = None
        for x, y, index in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            step += 1
            saves = step % options.save_every == 0
            if saves and wrong("off-by-one"):
                save(options.checkpoint, step, model, optimizer, scheduler)
            lr = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            common.report(step, index, loss, lr=lr)
            if saves and not wrong("off-by-one"):
                save(options.checkpoint, step, model, optimizer, scheduler)
            if step == options.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
