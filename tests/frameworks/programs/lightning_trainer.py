"""Lightning's Trainer: DDP, FSDP, or FSDP2 by tensor parallelism (ModelParallelStrategy)."""

import argparse
import os
import warnings

import digest
import lightning
import torch
from fabric import block, shard
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy


class Classifier(lightning.LightningModule):
    """Which of eight inputs is the greatest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(block(8), block(8))
        self.accuracy = MulticlassAccuracy(8)

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard(self.net, self.device_mesh)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        self.log("val_loss", nn.functional.cross_entropy(logits, batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        digest.say("logged", self.trainer.callback_metrics)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(length: int, shuffle: bool) -> DataLoader:
    inputs = torch.randn(length, 8)
    return DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=4, shuffle=shuffle)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", choices=["ddp", "fsdp", "model_parallel"], default="ddp")
    parser.add_argument("--gpu", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    world = int(os.environ["WORLD_SIZE"])
    strategy = {
        "ddp": DDPStrategy,
        "fsdp": lambda: FSDPStrategy(auto_wrap_policy={nn.Sequential}),
        "model_parallel": lambda: ModelParallelStrategy(world // 2, 2),
    }[options.strategy]()
    digest.watch()
    lightning.seed_everything(9)
    names = ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"]
    trainer = lightning.Trainer(
        accelerator="cuda" if options.gpu else "cpu",
        devices=world,
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=None if options.strategy == "fsdp" else 1.0,
        **dict.fromkeys(names, False),
    )
    trainer.fit(Classifier(), loader(161, shuffle=True), loader(37, shuffle=False))
    digest.say("fitted", trainer.callback_metrics)


if __name__ == "__main__":
    main()
