"""accelerate: a prepared model, optimizer, scheduler and loader, save_state and load_state.

The rest of the epoch is read by skip_first_batches.
"""

from __future__ import annotations

import common
import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, set_seed
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.utils.data import DataLoader

BUGS = (
    # https://github.com/huggingface/accelerate/issues/2016: a fresh loader is skipped as if it were
    # in its first epoch; the epoch in progress has another order.
    "epoch-not-set",
    # The prepared objects are saved; the scheduler was not prepared, nor registered.
    "scheduler-not-registered",
)


def main() -> None:
    options = common.options(*BUGS, samples=24)
    set_seed(0)
    seeded = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = Accelerator(cpu=True, dataloader_config=seeded)
    loader = DataLoader(
        common.Samples(options.samples),
        GLOBAL_BATCH // accelerator.num_processes,
        shuffle=True,
        drop_last=True,
    )
    model = common.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3 * options.steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if not wrong("scheduler-not-registered"):
        accelerator.register_for_checkpointing(scheduler)
    step = 0
    if path := common.newest(options.checkpoint):
        accelerator.load_state(str(path))
        step = int(path.name.removeprefix("step-"))
    per_epoch = options.samples // GLOBAL_BATCH
    while step < options.steps:
        epoch, skipped = divmod(step, per_epoch)
        if not (wrong("epoch-not-set") and skipped):
            loader.set_epoch(epoch)
        batches = skip_first_batches(loader, skipped) if skipped else loader
        if skipped and hasattr(batches, "set_epoch") and not wrong("epoch-not-set"):
            batches.set_epoch(epoch)
        for x, y, index in batches:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            lr = scheduler.get_last_lr()[0]
            optimizer.step()
            scheduler.step()
            step += 1
            common.report(step, index, loss, lr=lr)
            if step % options.save_every == 0:
                path = common.begin(options.checkpoint, step)
                accelerator.save_state(str(path))
                common.finish(path)
            if step == options.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
