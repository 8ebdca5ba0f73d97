# run: --ranks 3 --check
"""A vocabulary is built and cached by whoever finds no cache: all ranks that look before it is
there, and others read it while it is written."""

import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

CORPUS = "the cat sat on the mat and the dog sat on the cat".split()


class Vocabulary:
    def __init__(self, words):
        self.index = {word: i for i, word in enumerate(words)}

    @classmethod
    def cached(cls, cache):
        if not cache.exists():
            words = [word for word, _ in Counter(CORPUS).most_common()]
            with open(cache, "w") as file:  # or here
                json.dump(words, file)
        with open(cache) as file:  # finds: file-race on 1, 2
            return cls(json.load(file))

    def encode(self, words):
        return torch.tensor([self.index[word] for word in words])


def main():
    dist.init_process_group("gloo")
    folder = Path(os.environ.get("SCRATCH", tempfile.gettempdir()))
    cache = folder / f"vocabulary-{os.environ['MASTER_PORT']}.json"
    if "--fixed" in sys.argv:
        if dist.get_rank() == 0:
            Vocabulary.cached(cache)
        dist.barrier()
    vocabulary = Vocabulary.cached(cache)
    torch.manual_seed(0)
    model = nn.Embedding(len(vocabulary.index), 4)
    total = model(vocabulary.encode(CORPUS[dist.get_rank() :: 3])).detach().sum(0)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"sum {total.sum().item():.4f}")
        cache.unlink()
    dist.destroy_process_group()


main()
