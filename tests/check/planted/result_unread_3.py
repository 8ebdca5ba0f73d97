# run: --ranks 3 --check
"""Predictions of all ranks are gathered for a metric, which is then computed from the rank's own
predictions."""

import sys

import torch
import torch.distributed as dist
import torch.nn as nn


def gather(tensor):
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.cat(gathered)


class RankingMetric:
    """The share of pairs that are ordered rightly, over the examples of all ranks."""

    def __init__(self, fixed):
        self.fixed = fixed

    def __call__(self, scores, labels):
        scores, labels = scores.contiguous(), labels.contiguous()
        all_scores = [torch.empty_like(scores) for _ in range(dist.get_world_size())]
        dist.all_gather(all_scores, scores)  # finds: result-unread on all
        if self.fixed:
            scores, labels = torch.cat(all_scores), gather(labels)
        greater = scores[:, None] > scores[None, :]
        pairs = labels[:, None] > labels[None, :]
        return (greater & pairs).sum() / pairs.sum()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    torch.manual_seed(7 + dist.get_rank())
    x = torch.randn(9, 5)
    labels = x.norm(dim=1)
    metric = RankingMetric("--fixed" in sys.argv)
    with torch.inference_mode():
        value = metric(model(x).squeeze(1), labels)
    if dist.get_rank() == 0:
        print(f"ordered rightly: {value.item():.4f}")
    dist.destroy_process_group()


main()
