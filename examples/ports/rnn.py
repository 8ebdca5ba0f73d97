"""Train an LSTM or a GRU with PopTorch: it reads a handwritten digit row by row, from the top.

    gpusim run examples/ports/rnn.py
    gpusim run examples/ports/rnn.py --cell GRU --replicas 8

The weights travel in a checkpoint from the training to a program of its own for inference, which
is compiled ahead, without an IPU.
"""

import argparse
import tempfile
from pathlib import Path

import poptorch
import torch
from sklearn.datasets import load_digits
from torch import nn


class Reader(nn.Module):
    """The scores of ten digits, from the last state of a recurrent network over the rows."""

    def __init__(self, cell, hidden):
        super().__init__()
        self.rnn = {"LSTM": nn.LSTM, "GRU": nn.GRU}[cell](8, hidden)
        self.scores = nn.Linear(hidden, 10)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, images, labels=None):
        rows = images.transpose(0, 1)  # steps first
        states, _ = self.rnn(rows)
        scores = self.scores(states[-1])
        if labels is None:
            return torch.log_softmax(scores, 1)
        return scores.argmax(1), self.loss(scores, labels)


def datasets():
    """1,437 digits for training, 360 held out."""
    pixels, labels = load_digits(return_X_y=True)
    rows = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 8, 8) / 16
    digits = torch.utils.data.TensorDataset(rows, torch.tensor(labels))
    generator = torch.Generator().manual_seed(0)
    return torch.utils.data.random_split(digits, [len(digits) - 360, 360], generator)


def train(dataset, args, checkpoint):
    torch.manual_seed(args.seed)
    model = Reader(args.cell, args.hidden)
    options = poptorch.Options().deviceIterations(4).replicationFactor(args.replicas)
    options.outputMode(poptorch.OutputMode.Sum).randomSeed(args.seed)
    loader = poptorch.DataLoader(
        options,
        dataset,
        batch_size=args.micro_batch,
        shuffle=True,
        mode=poptorch.DataLoaderMode.Async,
        async_options={"early_preload": True, "load_indefinitely": False},
    )
    optimizer = poptorch.optim.Adam(model.parameters(), lr=args.lr, max_grad_norm=1.0)
    optimizer.variable_attrs.markAsConstant("betas")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=args.epochs // 2 + 1, gamma=0.3)
    training = poptorch.trainingModel(model, options, optimizer)
    micro_batches = 4 * args.replicas
    for epoch in range(args.epochs):
        losses = [training(rows, labels)[1] / micro_batches for rows, labels in loader]
        schedule.step()
        training.setOptimizer(optimizer)
        print(f"epoch {epoch}: loss {torch.stack(losses).mean():.3f}", flush=True)
    torch.save(training.state_dict(), checkpoint)
    training.destroy()
    loader.terminate()


def compile_for_inference(args, checkpoint, executable):
    """Write an executable with the trained weights, on a machine that may be without IPUs."""
    model = Reader(args.cell, args.hidden).eval()
    model.load_state_dict(torch.load(checkpoint))
    options = poptorch.Options().useOfflineIpuTarget().deviceIterations(3)
    inference = poptorch.inferenceModel(model, options)
    inference.compileAndExport(str(executable), torch.zeros(3 * 20, 8, 8))


def classify(dataset, executable):
    inference = poptorch.load(str(executable))
    loader = poptorch.DataLoader(inference.options, dataset, batch_size=20)
    right = torch.cat([inference(rows).argmax(1) == labels for rows, labels in loader])
    inference.destroy()
    return right.float().mean().item()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cell", choices=["LSTM", "GRU"], default="LSTM")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=48)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args(arguments)

    training_set, held_out = datasets()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, executable = Path(folder) / "weights.pt", Path(folder) / "reader.poptorch"
        train(training_set, args, checkpoint)
        compile_for_inference(args, checkpoint, executable)
        accuracy = classify(held_out, executable)
    print(f"{args.cell}: {accuracy:.1%} of the held-out digits are right")


if __name__ == "__main__":
    main()
