"""transformers' Trainer, which resumes from its newest checkpoint; the global batch is the same."""

from __future__ import annotations

import os

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

BUGS = (
    # ignore_data_skip: the epoch in progress begins again, with the samples that it has had.
    "data-not-skipped",
    # save_only_model: the optimizer, the scheduler and the generators are not in the checkpoint.
    "weights-alone",
)


class Rows(torch.utils.data.Dataset):
    """The samples as the Trainer reads them."""

    def __init__(self, count: int) -> None:
        self.samples = common.Samples(count)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y, _ = self.samples[index]
        return {"x": x, "labels": y, "index": torch.tensor(index)}


class Model(nn.Module):
    """A network that computes its loss, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = common.network(0.1)

    def forward(self, x: Tensor, labels: Tensor, index: Tensor) -> dict[str, Tensor]:
        logits = self.network(x)
        loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def main() -> None:
    options = common.options(*BUGS, samples=24)
    ranks = int(os.environ["WORLD_SIZE"])
    arguments = TrainingArguments(
        output_dir=str(options.checkpoint),
        use_cpu=True,
        per_device_train_batch_size=GLOBAL_BATCH // ranks,
        max_steps=options.steps,
        save_steps=options.save_every,
        logging_steps=1,
        warmup_steps=3,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        ddp_backend="gloo",
        ignore_data_skip=wrong("data-not-skipped"),
        save_only_model=wrong("weights-alone"),
    )
    torch.manual_seed(0)
    trainer = Trainer(Model(), arguments, train_dataset=Rows(options.samples))
    options.checkpoint.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.checkpoint)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
