"""PyTorch's own context parallelism, whose ring attention has GPUs' kernels alone."""

import argparse

import digest
import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.nn.attention import SDPBackend, sdpa_kernel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rotate", default="allgather", choices=("alltoall", "allgather"))
    options = parser.parse_args()
    digest.watch()
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (ranks,))
    set_rotate_method(options.rotate)
    model = tiny.Decoder().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(10):
        inputs, targets = (each.cuda() for each in tiny.text(step, batch=2, length=64))
        with (
            sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
            context_parallel(mesh, buffers=[inputs, targets], buffer_seq_dims=[1, 1]),
        ):
            loss = tiny.loss(model(inputs), targets) / ranks
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean)
    digest.say("losses", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
