"""Metrics of torchmetrics, synchronised over ranks that saw different numbers of samples."""

import digest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassConfusionMatrix,
)
from torchmetrics.retrieval import RetrievalMRR

CLASSES = 4


def main() -> None:
    digest.watch()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    metrics = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(CLASSES),
            "auroc": MulticlassAUROC(CLASSES),
            "binned": MulticlassAUROC(CLASSES, thresholds=20),
            "confusion": MulticlassConfusionMatrix(CLASSES),
        }
    )
    mean, losses, ranking = MeanMetric(), CatMetric(), RetrievalMRR()
    draw = torch.Generator().manual_seed(7 + rank)
    for _ in range(3):
        for step in range(6):
            inputs = torch.randn(5 + (rank + step) % 3, 9, generator=draw)
            labels = inputs[:, :CLASSES].argmax(1)
            logits = model(inputs)
            each = nn.functional.cross_entropy(logits, labels, reduction="none")
            optimizer.zero_grad()
            (each.sum() / 6).backward()  # of 5 to 7 rows: a mean would weigh them by rank
            optimizer.step()
            metrics.update(logits.detach(), labels)
            mean.update(each.detach())
            if (rank + step) % 2:
                losses.update(each.detach())
            queries = torch.arange(len(labels)) // 3 + 100 * rank
            ranking.update(logits.detach()[:, 0], labels == 0, indexes=queries)
        for metric in (metrics, mean, losses, ranking):
            digest.say(type(metric).__name__, metric.compute())
            metric.reset()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
