# run: --ranks 4 --check=nccl --device cpu
"""A 2 x 2 mesh reduces along both of its dimensions; a rank's "near" dimension goes first."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FIXED = "--fixed" in sys.argv
SUM = dist.ReduceOp.SUM


class MeshSums:
    def __init__(self, mesh):
        self.groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
        row, column = mesh.get_coordinate()
        self.near = "row" if FIXED or (row + column) % 2 == 0 else "column"

    def order(self):
        return sorted(self.groups, key=lambda name: name != self.near)

    def add(self, values):
        works = []
        for name in self.order():
            x, group = values[name], self.groups[name]
            work = dist.all_reduce(x, SUM, group, True)  # finds: communicator-order on all
            works.append(work)
        for work in works:
            work.wait()
        return values


local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("column", "row"))
rows = torch.full((3,), float(local_rank), device="cuda")
columns = torch.full((5,), 10.0**local_rank, device="cuda")
sums = MeshSums(mesh).add({"row": rows, "column": columns})
print({name: value[0].item() for name, value in sums.items()})
dist.destroy_process_group()
