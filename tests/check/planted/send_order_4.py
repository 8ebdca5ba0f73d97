# run: --ranks 2 --check=nccl
"""1F1B on two stages: in the steady state both isend first and irecv after."""

import sys

import torch
import torch.distributed as dist
from torch import nn

FIXED = "--fixed" in sys.argv
SHAPE = (2, 4)


class Channel:
    def __init__(self, peer):
        self.peer = peer

    def send_receive(self, outgoing):
        incoming = torch.empty(SHAPE)
        if FIXED:
            operations = [
                dist.P2POp(dist.isend, outgoing, self.peer),
                dist.P2POp(dist.irecv, incoming, self.peer),
            ]
            requests = dist.batch_isend_irecv(operations)
        else:
            requests = [dist.isend(outgoing, self.peer)]  # finds: send-order on all
            requests.append(dist.irecv(incoming, self.peer))  # or here
        for request in requests:
            request.wait()
        return incoming


def first_stage(layer, batches, channel):
    outputs = [layer(batches[0])]
    dist.send(outputs[0].detach(), 1)
    for x in batches[1:]:
        outputs.append(layer(x))
        outputs.pop(0).backward(channel.send_receive(outputs[-1].detach()))
    gradient = torch.empty(SHAPE)
    dist.recv(gradient, 1)
    outputs.pop().backward(gradient)


def last_stage(layer, count, channel):
    x = torch.empty(SHAPE)
    dist.recv(x, 0)
    for i in range(count):
        x.requires_grad_()
        layer(x).square().mean().backward()
        if i + 1 < count:
            x = channel.send_receive(x.grad)
    dist.send(x.grad, 0)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
layer = nn.Linear(4, 4)
if dist.get_rank() == 0:
    first_stage(layer, torch.randn(3, *SHAPE), Channel(1))
else:
    last_stage(layer, 3, Channel(0))
print("gradient", layer.weight.grad.norm().item())
dist.destroy_process_group()
