"""Accelerate's own loop: accumulation, clipping, evaluation by gathering, a restored state."""

import digest
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, CLASSES = 12, 3


def dataset(length: int, seed: int) -> TensorDataset:
    inputs = torch.randn(length, FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def main() -> None:
    digest.watch()
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    hidden = [nn.Linear(FEATURES, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1)]
    model = nn.Sequential(*hidden, nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    train = accelerator.prepare(DataLoader(dataset(131, 1), batch_size=4, shuffle=True))
    held_out = accelerator.prepare(DataLoader(dataset(37, 2), batch_size=4))

    def epoch() -> None:
        model.train()
        for inputs, labels in train:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    digest.say("norm", accelerator.clip_grad_norm_(model.parameters(), 0.5))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        digest.say("loss", accelerator.reduce(loss.detach(), reduction="mean"))

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            pairs = [accelerator.gather_for_metrics((model(x).argmax(1), y)) for x, y in held_out]
        guesses, labels = (torch.cat(each) for each in zip(*pairs, strict=True))
        digest.say("accuracy", [(guesses == labels).double().mean().item(), len(labels)])

    epoch()
    accelerator.save_state("state")
    epoch()
    evaluate()
    accelerator.load_state("state")
    epoch()
    evaluate()
    accelerator.end_training()


if __name__ == "__main__":
    main()
