"""PopTorch training of handwritten digits on simulated replicas, against a plain PyTorch loop.

Run it as it is, or with more replicas than you have IPUs: --replicas 16. With `import poptorch`
instead of `from gpusim import poptorch` it is an ordinary PopTorch program, for `gpusim run`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits

from gpusim import poptorch

BATCH, RATE = 8, 0.005  # images in a micro-batch


class Net(torch.nn.Module):
    """Two layers; returns the scores of ten digits, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(64, 48)
        self.scores = torch.nn.Linear(48, 10)

    def forward(
        self, images: torch.Tensor, digits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.scores(torch.relu(self.hidden(images)))
        return scores, torch.nn.functional.cross_entropy(scores, digits)


def by_hand(
    net: Net, images: torch.Tensor, digits: torch.Tensor, together: int, adam: torch.optim.Adam
) -> None:
    """One call of the training model: a step after this number of micro-batches."""
    batches = list(zip(images.split(BATCH), digits.split(BATCH), strict=True))
    for first in range(0, len(batches), together):
        adam.zero_grad()
        for batch in batches[first : first + together]:
            (net(*batch)[1] / together).backward()
        adam.step()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--calls", type=int, default=25)
    chosen = parser.parse_args(arguments)

    options = poptorch.Options().replicationFactor(chosen.replicas).deviceIterations(4)
    options.Training.gradientAccumulation(2)
    together = 2 * chosen.replicas  # micro-batches in an update

    torch.manual_seed(0)
    net = Net()
    alone = copy.deepcopy(net)
    adam = torch.optim.Adam(alone.parameters(), lr=RATE)
    train = poptorch.trainingModel(net, options, poptorch.optim.Adam(net.parameters(), lr=RATE))

    pixels, numbers = load_digits(return_X_y=True)
    images, digits = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(numbers)
    order = torch.Generator().manual_seed(0)
    for _ in range(chosen.calls):
        dealt = torch.randint(len(images), (4 * together * BATCH,), generator=order)
        train(images[dealt], digits[dealt])
        by_hand(alone, images[dealt], digits[dealt], together, adam)

    train.detachFromDevice()  # inference may need one of its IPUs
    infer = poptorch.inferenceModel(net)
    scores, _ = infer(images, digits)
    right = (scores.argmax(dim=1) == digits).float().mean()
    print(f"{chosen.replicas} replicas, {4 * chosen.calls} updates: {right:.1%} are right")
    for ours, theirs in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)
    print("agreed: all replicas with a plain PyTorch loop, to 1e-3")


if __name__ == "__main__":
    main()
