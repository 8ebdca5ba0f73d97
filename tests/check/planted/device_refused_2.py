# run: --ranks 3 --check=nccl --device cpu
"""After loading a checkpoint the state of a random generator is broadcast, a tensor of the host."""

import os
import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


class ResumableSampler:
    def __init__(self, size, device):
        self.size, self.device = size, device
        self.generator = torch.Generator()
        self.generator.manual_seed(dist.get_rank())

    def synchronize(self):
        state = self.generator.get_state()
        if FIXED:
            state = state.to(self.device)
        dist.broadcast(state, src=0)  # finds: device-refused on all
        self.generator.set_state(state.cpu())

    def __iter__(self):
        order = torch.randperm(self.size, generator=self.generator)
        yield from order[dist.get_rank() :: dist.get_world_size()].tolist()


device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
sampler = ResumableSampler(9, device)
sampler.synchronize()
print("samples", list(sampler))
dist.destroy_process_group()
