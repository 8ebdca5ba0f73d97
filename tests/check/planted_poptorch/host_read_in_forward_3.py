# run: --check
"""A sequence model cuts its batch to the longest sequence, by a helper function."""

import argparse

import poptorch
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
FIXED = parser.parse_args().fixed


def mask_of(lengths, size):
    return torch.arange(size)[None, :] < lengths[:, None]


def trim(tokens, lengths):
    if FIXED:
        return tokens, mask_of(lengths, tokens.shape[1])
    longest = int(lengths.max())  # finds: host-read-in-forward on 0, 1, 2, 3
    return tokens[:, :longest], mask_of(lengths, longest)


class Pool(nn.Module):
    def forward(self, embedded, mask):
        weights = mask[..., None].to(embedded.dtype)
        return (embedded * weights).sum(1) / weights.sum(1)


class Tagger(nn.Module):
    def __init__(self, vocabulary=16, width=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.pool = Pool()
        self.head = nn.Linear(width, 1)

    def forward(self, tokens, lengths):
        tokens, mask = trim(tokens, lengths)
        return self.head(self.pool(self.embedding(tokens), mask)).squeeze(-1)


torch.manual_seed(2)
options = poptorch.Options().replicationFactor(4).deviceIterations(2)
tokens, lengths = torch.randint(0, 16, (16, 7)), torch.randint(1, 8, (16,))
print(poptorch.inferenceModel(Tagger(), options)(tokens, lengths).tolist())
