"""A small GPT of characters with automatic mixed precision, which learns this file by heart.

torchrun --standalone --nproc-per-node 4 char_gpt.py
gpusim torchrun --nproc-per-node 64 --reduction nccl-ring char_gpt.py --steps 20
"""

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Characters(Dataset):
    """Windows of a text, and the characters that follow."""

    def __init__(self, text: str, length: int) -> None:
        self.letters = sorted(set(text))
        self.length = length
        numbers = {letter: number for number, letter in enumerate(self.letters)}
        self.text = torch.tensor([numbers[letter] for letter in text])

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[index : index + self.length + 1]
        return window[:-1], window[1:]


@dataclass
class GPTConfig:
    letters: int
    length: int
    layers: int = 2
    heads: int = 4
    width: int = 32
    dropout: float = 0.05


class SelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        mask = torch.ones(config.length, config.length, dtype=torch.bool).tril()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length, width = x.shape[1:]
        q, k, v = self.qkv(x).split(width, dim=2)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(width / self.heads)
        scores = scores.masked_fill(~self.mask[:length, :length], -math.inf)
        seen = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.out(seen.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """The weights of the embedding and of the head are shared."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.letters = nn.Embedding(config.letters, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for _ in range(config.layers):
            wide = nn.Linear(config.width, 4 * config.width)
            narrow = nn.Linear(4 * config.width, config.width)
            block = nn.ModuleDict(
                {
                    "norm1": nn.LayerNorm(config.width),
                    "attention": SelfAttention(config),
                    "norm2": nn.LayerNorm(config.width),
                    "mlp": nn.Sequential(wide, nn.GELU(), narrow, nn.Dropout(config.dropout)),
                }
            )
            self.blocks.append(block)
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.letters, bias=False)
        self.apply(self.initialise)
        self.head.weight = self.letters.weight

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.08)

    def forward(
        self, letters: torch.Tensor, targets: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        places = torch.arange(letters.shape[1], device=letters.device)
        x = self.dropout(self.letters(letters) + self.places(places))
        for block in self.blocks:
            x = x + block["attention"](block["norm1"](x))
            x = x + block["mlp"](block["norm2"](x))
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, letters: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            logits, _ = self(letters[:, -self.config.length :])
            chosen = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
            letters = torch.cat([letters, chosen], 1)
        return letters


def forever(loader: DataLoader, sampler: DistributedSampler) -> Iterator[list[torch.Tensor]]:
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="a GPT of characters with mixed precision")
    parser.add_argument("--text", default=__file__, help="the file to learn")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=8, help="of a rank")
    parser.add_argument("--length", type=int, default=24, help="characters of a window")
    parser.add_argument("--sample", type=int, default=60, help="characters to write at the end")
    parser.add_argument("--out", help="a file for the final weights")
    options = parser.parse_args()

    accelerated = torch.accelerator.is_available()
    device_type = torch.accelerator.current_accelerator().type if accelerated else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if accelerated else None)
    if accelerated:
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    with open(options.text, encoding="utf-8") as file:
        data = Characters(file.read(), options.length)
    torch.manual_seed(1337)
    model = DDP(GPT(GPTConfig(len(data.letters), options.length)).to(device))
    torch.manual_seed(1337 + rank)  # dropout differs between ranks
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    low = torch.float16 if device_type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device_type, enabled=low == torch.float16)

    sampler: DistributedSampler = DistributedSampler(data, ranks, rank, drop_last=True)
    loader: DataLoader = DataLoader(data, batch_size=options.batch_size, sampler=sampler)
    losses = []
    for step, (x, y) in zip(range(options.steps), forever(loader, sampler), strict=False):
        with torch.autocast(device_type, dtype=low):
            _, loss = model(x.to(device), y.to(device))
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        warm_up.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0 and (step % 20 == 0 or step + 1 == options.steps):
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if rank == 0:
        model.eval()
        begin = data.text[None, : options.length].to(device)
        written = model.module.generate(begin, options.sample)[0].tolist()
        print("".join(data.letters[number] for number in written), flush=True)
        if options.out:
            torch.save({"model": model.module.state_dict(), "losses": losses}, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
