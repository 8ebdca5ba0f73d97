# run: --ranks 4 --check=nccl --device cpu
"""All ranks save the same checkpoint to the same file at the same time."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP


class Checkpointer:
    def __init__(self, path, fixed):
        self.path = path
        self.fixed = fixed

    def save(self, step, model, optimizer):
        if self.fixed and dist.get_rank() != 0:
            return
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, self.path)  # finds: file-race on all

    def load(self, model, optimizer):
        state = torch.load(self.path, map_location="cuda")  # or here
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"]


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
model = DDP(torch.nn.Linear(4, 4).cuda(), device_ids=[local_rank])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
folder = os.environ.get("SCRATCH", tempfile.gettempdir())
path = os.path.join(folder, f"last-{os.environ['MASTER_PORT']}.ckpt")
checkpointer = Checkpointer(path, fixed="--fixed" in sys.argv)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4, device="cuda")).square().sum().backward()
    optimizer.step()
checkpointer.save(3, model, optimizer)
dist.barrier()
print("saved at step", checkpointer.load(model, optimizer))
dist.barrier()
if local_rank == 0:
    os.remove(path)
dist.destroy_process_group()
