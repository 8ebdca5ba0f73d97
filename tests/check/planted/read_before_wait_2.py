# run: --ranks 3 --check=nccl --device cpu
"""An accuracy meter on the GPU: compute() takes the totals that sync() has begun to add."""

import os
import sys

import torch
import torch.distributed as dist


class Accuracy:
    def __init__(self, device):
        self.totals = torch.zeros(2, device=device)
        self.work = None

    def update(self, logits, labels):
        self.totals[0] += (logits.argmax(-1) == labels).sum()
        self.totals[1] += labels.numel()

    def sync(self):
        self.work = dist.all_reduce(self.totals, async_op=True)  # or here

    def finish(self):
        if self.work is not None:
            self.work.wait()
            self.work = None

    def compute(self):
        correct, seen = self.totals.tolist()  # finds: read-before-wait on all
        return correct / seen


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
dist.init_process_group("nccl", device_id=device)
generator = torch.Generator().manual_seed(dist.get_rank())
meter = Accuracy(device)
for _ in range(4):
    logits = torch.randn(6, 5, generator=generator).to(device)
    labels = torch.randint(0, 5, (6,), generator=generator).to(device)
    meter.update(logits, labels)
meter.sync()
if "--fixed" in sys.argv:
    meter.finish()
accuracy = meter.compute()
meter.finish()
print(f"accuracy {accuracy:.3f}")
dist.destroy_process_group()
