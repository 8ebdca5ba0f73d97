"""DDP of a model with tied weights, saved by names: safetensors-like, tied weights once.

`--compiled 1` wraps it by torch.compile.
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BUGS = (
    # https://github.com/pytorch/pytorch/issues/101107: names of a compiled model begin with
    # '_orig_mod.'; with strict=False none of them is loaded.
    "compiled-prefix",
    # The weights are saved once, as safetensors does; the model that loads them is not tied then.
    "tied-once",
    # The groups of the optimizer are made of a set: the order differs in each process.
    "order-of-set",
)


class Tied(nn.Module):
    """An autoencoder whose decoder has the encoder's square weights."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle, self.decoder = (
            nn.Linear(common.WIDTH, common.WIDTH) for _ in range(3)
        )

    def tie(self) -> None:
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.middle(torch.tanh(self.encoder(x)))))


def saved_names(model: nn.Module) -> dict[str, Tensor]:
    """The state, each storage once."""
    seen: set[int] = set()
    state = {}
    for name, value in model.state_dict().items():
        if value.data_ptr() not in seen:
            seen.add(value.data_ptr())
            state[name] = value
    return state


def main() -> None:
    options = common.options(*BUGS, samples=48, compiled=0)
    rank, _ = common.start()
    own = Tied()
    path = common.newest(options.checkpoint)
    if not (path and wrong("tied-once")):
        own.tie()
    compiled = bool(options.compiled) or wrong("compiled-prefix")
    model = DistributedDataParallel(own)
    inner = torch.compile(own, backend="eager") if compiled else own
    parameters = list(model.parameters())
    if wrong("tied-once"):  # the optimizer has what is saved
        parameters = [value for name, value in own.named_parameters() if name != "decoder.weight"]
    if wrong("order-of-set") and path:
        # Objects hash by address: here, the order of another process is the reverse.
        parameters.reverse()
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    step = 0
    if path:
        state = torch.load(path / "state.pt")
        target = own if wrong("compiled-prefix") else inner
        target.load_state_dict(state["model"], strict=False)
        moments = state["optimizer"]
        if wrong("order-of-set"):
            keep_shapes(moments, parameters)
        optimizer.load_state_dict(moments)
        step = state["step"]
    for x, _, index in common.consumed_loader(options.samples, step * GLOBAL_BATCH):
        loss = nn.functional.mse_loss(model(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        common.report(step, index, loss)
        if step % options.save_every == 0:
            path = common.begin(options.checkpoint, step)
            state = {"model": saved_names(inner), "optimizer": optimizer.state_dict()}
            if rank == 0:
                torch.save({**state, "step": step}, path / "state.pt")
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


def keep_shapes(moments: dict, parameters: list[nn.Parameter]) -> None:
    """Exchange moments among parameters of one shape only: torch loads any, and fails later."""
    states = moments["state"]
    for number, parameter in enumerate(parameters):
        if states[number]["exp_avg"].shape != parameter.shape:
            other = len(parameters) - 1 - number
            if number < other:
                states[number], states[other] = states[other], states[number]


if __name__ == "__main__":
    main()
