# run: --ranks 2 --check=nccl --device cpu
"""A prefetcher copies the next batch on a stream of its own; the training loop uses the batch on
the default stream without waiting for the copy."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class DataPrefetcher:
    def __init__(self, loader, args):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.args = args
        self.preload()

    def preload(self):
        try:
            images, labels = next(self.loader)
        except StopIteration:
            self.images = self.labels = None
            return
        with torch.cuda.stream(self.stream):
            self.images = images.cuda(non_blocking=True).float().div_(255)  # or here
            self.labels = labels.cuda(non_blocking=True)  # or here

    def next(self):
        if self.args.fixed:
            torch.cuda.current_stream().wait_stream(self.stream)
        images, labels = self.images, self.labels
        if images is not None:
            images.record_stream(torch.cuda.current_stream())
            labels.record_stream(torch.cuda.current_stream())
        self.preload()
        return images, labels


parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
torch.manual_seed(0)
data = TensorDataset(torch.randint(0, 256, (32, 12), dtype=torch.uint8), torch.randint(0, 3, (32,)))
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data), pin_memory=True)
model = DDP(torch.nn.Linear(12, 3).cuda(), device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
prefetcher = DataPrefetcher(loader, args)
images, labels = prefetcher.next()
while images is not None:
    loss = F.cross_entropy(model(images), labels)  # finds: stream-race on all
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    images, labels = prefetcher.next()
dist.destroy_process_group()
