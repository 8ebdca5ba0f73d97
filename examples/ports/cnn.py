"""Train a small residual network with batch norm on handwritten digits, with PopTorch.

    gpusim run examples/ports/cnn.py
    poprun --num-instances 2 --num-replicas 4 python examples/ports/cnn.py

A training and an inference model of the same module stay on their IPUs and take turns: the
inference model takes the trained weights over by itself.
"""

import argparse

import popdist
import popdist.poptorch
import poptorch
import torch
from sklearn.datasets import load_digits
from torch import nn


class Block(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        return torch.relu(self.convolutions(x) + self.around(x))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(Block(width, width), Block(width, 2 * width, stride=2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.scores = nn.Linear(2 * width, 10)

    def forward(self, x):
        return self.scores(self.pool(self.blocks(self.stem(x))).flatten(1))


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.05)

    def forward(self, images, labels=None):
        scores = self.model(images)
        if labels is None:
            return scores
        return scores.argmax(1) == labels, self.loss(scores, labels)


def datasets():
    """1,437 digits for training, 360 for validation."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    images = (images - images.mean()) / images.std()
    digits = torch.utils.data.TensorDataset(images, torch.tensor(labels))
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.random_split(digits, [len(digits) - 360, 360], generator)


def make_options(args):
    if popdist.isPopdistEnvSet():
        popdist.init()
        options = popdist.poptorch.Options()
    else:
        options = poptorch.Options().replicationFactor(args.replicas)
    return options.randomSeed(args.seed)


def validate(inference, loader):
    right = torch.cat([inference(images).argmax(1) == labels for images, labels in loader])
    return right.float().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)

    torch.manual_seed(args.seed)
    model = WithLoss(Net(args.width))
    training_set, validation_set = datasets()

    options = make_options(args)
    options.deviceIterations(2).outputMode(poptorch.OutputMode.All)
    options.broadcastBuffers(False)  # each replica has running statistics of its own
    options.Training.gradientAccumulation(2)
    loader = poptorch.DataLoader(
        options, training_set, batch_size=args.micro_batch, shuffle=True, num_workers=0
    )
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=False
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    training = poptorch.trainingModel(model, options, optimizer)

    inference_options = poptorch.Options().deviceIterations(3)
    inference_options.Distributed.disable()
    validation_loader = poptorch.DataLoader(inference_options, validation_set, batch_size=40)
    inference = poptorch.inferenceModel(model, inference_options)

    accuracy = 0.0
    for epoch in range(args.epochs):
        model.train()
        losses, right = [], []
        for images, labels in loader:
            found, loss = training(images, labels)
            losses.append(loss)
            right.append(found)
        schedule.step()
        training.setOptimizer(optimizer)
        model.eval()
        accuracy = validate(inference, validation_loader)
        if popdist.getInstanceIndex() == 0:
            print(
                f"epoch {epoch}: loss {torch.cat(losses).mean():.3f}, "
                f"training {torch.cat(right).float().mean():.1%}, validation {accuracy:.1%}",
                flush=True,
            )
    training.destroy()
    inference.destroy()

    with torch.no_grad():  # the module has been trained too
        images, labels = validation_set[:]
        by_hand = (model.eval()(images).argmax(1) == labels).float().mean().item()
    if popdist.getInstanceIndex() == 0:
        print(f"{accuracy:.1%} of the validation digits are right, {by_hand:.1%} on the CPU")


if __name__ == "__main__":
    main()
