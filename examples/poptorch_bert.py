"""Fine-tuning a small BERT as PopTorch programs do: pipelined, in half precision, with checkpoints.

It is trained on 8 replicas of 2 IPUs each, and an epoch of that is compared with one on 8 replicas
of one IPU. With `import poptorch` for `from gpusim import poptorch` it is one for `gpusim run`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpusim import poptorch

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 24, 12, 32, 4, 2
CLS, KEY = 0, 1  # a text is of the second class if the key is one of its words
RATE = 2e-3


class Layer(nn.Module):
    """Attention and a feed-forward network, each with a residual and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.attended = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        self.last_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
        weights = torch.softmax(query @ key.mT / (WIDTH // HEADS) ** 0.5, dim=-1)
        x = self.norm(x + self.attended((weights @ value).transpose(1, 2).flatten(2)))
        return self.last_norm(x + self.feed_forward(x))


class Embeddings(nn.Module):
    """Words and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.norm(self.words(words) + self.positions)


class Bert(nn.Module):
    """Classifies texts; returns the scores, and with labels the loss too."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.classifier = nn.Linear(WIDTH, 2)

    def forward(self, words: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embeddings(words)
        for layer in self.layers:
            x = layer(x)
        scores = self.classifier(x[:, 0])
        if labels is None:
            return scores
        return scores, nn.functional.cross_entropy(scores, labels)


def pipelined(model: Bert) -> Bert:
    """The first half on IPU 0, the second on IPU 1."""
    poptorch.BeginBlock(model.embeddings, "embeddings", ipu_id=0)
    for number, layer in enumerate(model.layers):
        poptorch.BeginBlock(layer, f"layer {number}", ipu_id=2 * number // LAYERS)
    poptorch.BeginBlock(model.classifier, "classifier", ipu_id=1)
    return model


def texts(count: int) -> torch.utils.data.TensorDataset:
    """Random words, and whether the key is among them: in half of the texts it is."""
    words = torch.randint(KEY + 1, WORDS, (count, LENGTH))
    words[:, 0] = CLS
    labels = torch.arange(count) % 2
    places = torch.randint(1, LENGTH, (count,))
    words[labels == 1, places[labels == 1]] = KEY
    return torch.utils.data.TensorDataset(words, labels)


def options(replicas: int, *, pipeline: bool) -> poptorch.Options:
    """Of training, with enough accumulation for a pipeline."""
    made = poptorch.Options().replicationFactor(replicas).deviceIterations(2).randomSeed(7)
    made.Training.gradientAccumulation(4)
    made.Precision.enableStochasticRounding(True)
    if pipeline:
        made.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))
    made.outputMode(poptorch.OutputMode.All)
    made.autoRoundNumIPUs(True)
    return made


class Trainer:
    """A model in training, and its checkpoints."""

    def __init__(
        self, replicas: int, dataset: torch.utils.data.TensorDataset, *, pipeline: bool
    ) -> None:
        torch.manual_seed(0)
        model = Bert().half().train()
        self.model = pipelined(model) if pipeline else model
        chosen = options(replicas, pipeline=pipeline)
        self.optimizer = poptorch.optim.AdamW(
            self.model.parameters(), lr=RATE, weight_decay=0.01, accum_type=torch.float16
        )
        modes = poptorch.DataLoaderMode
        mode = modes.Async if pipeline else modes.Sync  # the order is the same
        self.loader = poptorch.DataLoader(chosen, dataset, batch_size=2, shuffle=True, mode=mode)
        self.train = poptorch.trainingModel(self.model, chosen, self.optimizer)

    def epoch(self) -> float:
        """The mean loss of an epoch."""
        losses = [self.train(words, labels)[1].float().mean() for words, labels in self.loader]
        return float(torch.stack(losses).mean())

    def weights(self) -> list[Tensor]:
        """As they are now."""
        return [weight.detach().clone() for weight in self.model.parameters()]

    def save(self, path: Path) -> None:
        """Write a checkpoint."""
        held = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(held, path)

    def end(self) -> None:
        """Give the IPUs back, and end the loader's worker."""
        self.train.destroy()
        self.loader.terminate()


def accuracy(model: Bert, dataset: torch.utils.data.TensorDataset) -> float:
    """The share of texts that are classified as they should be."""
    words, labels = dataset.tensors
    infer = poptorch.inferenceModel(model.eval(), poptorch.Options().autoRoundNumIPUs(True))
    right = infer(words).argmax(dim=1) == labels
    infer.destroy()
    return float(right.float().mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--texts", type=int, default=1024)
    chosen = parser.parse_args(arguments)

    torch.manual_seed(1)
    dataset, held_out = texts(chosen.texts), texts(256)
    trainer = Trainer(chosen.replicas, dataset, pipeline=True)
    print(f"pipelined: epoch 0, loss {trainer.epoch():.3f}")
    first = trainer.weights()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint.pt"
        for epoch in range(1, chosen.epochs):
            print(f"pipelined: epoch {epoch}, loss {trainer.epoch():.3f}")
            trainer.save(checkpoint)
        trainer.end()
        restored = Bert().half()
        if checkpoint.exists():
            restored.load_state_dict(torch.load(checkpoint)["model"])
            print(f"{accuracy(restored, held_out):.1%} of new texts are classified right")

    plain = Trainer(chosen.replicas, dataset, pipeline=False)
    print(f"plain: epoch 0, loss {plain.epoch():.3f}")
    for ours, theirs in zip(first, plain.weights(), strict=True):
        assert torch.equal(ours, theirs)
    plain.end()
    print("agreed: pipelined and plain training, to the bit")


if __name__ == "__main__":
    main()
