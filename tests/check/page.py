"""The sections of docs/check.md: a small program of each kind, and what the check says of it.

`python -m tests.check --page` writes them.
"""

from __future__ import annotations

import re
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from gpusim.torch.distributed.checks.findings import KINDS, Finding

from .cases import ROOT, Said, run

__all__ = ["ELSEWHERE", "PAGE", "SNIPPETS", "Snippet", "section", "spoken", "write"]

PAGE = ROOT / "docs" / "check.md"
BEGIN, END = "<!-- python -m tests.check --page -->\n", "<!-- end -->"
NAME = "train.py"
PAGE_WIDTH, WIDTH = 120, 100

IMPORTS = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout
from torch.nn.parallel import DistributedDataParallel
"""
JOIN = """\
dist.init_process_group()
rank = dist.get_rank()
"""
LEAVE = "dist.destroy_process_group()\n"


@dataclass(frozen=True)
class Snippet:
    """A program of a few lines that has a fault.

    **Attributes**: `says` is the fault in a sentence, `options` are those of `gpusim torchrun`, and
    `lines` the program without its first lines and its last one.
    """

    says: str
    options: str
    lines: str

    @property
    def shown(self) -> str:
        """The program as the page has it; its first line is the command."""
        return f"# gpusim torchrun {self.options} {NAME}\n{self.lines}"

    @property
    def hidden(self) -> str:
        """The first lines, which the page has once for all."""
        return IMPORTS if "init_process_group" in self.lines else IMPORTS + JOIN

    def run(self) -> Said:
        """What the check says of it. Lines of the program are numbered as the page shows them."""
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / NAME
            path.write_text(self.hidden + self.shown + LEAVE)
            said = run(self.options.split(), path)
        place = re.compile(rf"(?:[\w./-]*/)?{re.escape(NAME)}:(\d+)")
        first = self.hidden.count("\n")

        def as_shown(text: str) -> str:
            return place.sub(lambda match: f"{NAME}:{int(match[1]) - first}", text)

        for each in said.findings:
            each.update({name: as_shown(each[name]) for name in ("site", "text")})
            each["related"] = list(map(as_shown, each["related"]))
        return said


SNIPPETS = {
    "read-before-wait": Snippet(
        "The output of an async call is read before `wait()`.",
        "--ranks 2 --check",
        """\
x = torch.full((4,), float(rank))
work = dist.all_reduce(x, async_op=True)
mean = x / dist.get_world_size()
work.wait()
print(mean)
""",
    ),
    "write-before-wait": Snippet(
        "A tensor of an async call, here its input, is written before `wait()`.",
        "--ranks 2 --check",
        """\
x, parts = torch.ones(4), [torch.empty(4), torch.empty(4)]
work = dist.all_gather(parts, x, async_op=True)
x.zero_()
work.wait()
print(parts)
""",
    ),
    "never-waited": Snippet(
        "The work of an async call is never waited for, nor seen to be complete.",
        "--ranks 2 --check",
        """\
loss = torch.tensor(float(rank))
dist.all_reduce(loss, async_op=True)
""",
    ),
    "overlapping-buffers": Snippet(
        "Two calls are in flight on memory that they share, and one of them writes it.",
        "--ranks 2 --check",
        """\
buffer = torch.ones(8)
first = dist.all_reduce(buffer[:5], async_op=True)
second = dist.all_reduce(buffer[4:], async_op=True)
first.wait(), second.wait()
print(buffer)
""",
    ),
    "aliased-operands": Snippet(
        "Tensors of one call share memory, in another form than the documented one.",
        "--ranks 2 --check",
        """\
tokens = torch.arange(4.0)
dist.all_to_all_single(tokens, tokens)
print(tokens)
""",
    ),
    "communicator-order": Snippet(
        "Ranks enqueue calls of two groups in different orders.",
        "--ranks 2 --check=nccl",
        """\
calls = [(torch.ones(4), dist.new_group([0, 1])) for _ in range(2)]
order = calls if rank == 0 else calls[::-1]
works = [dist.all_reduce(x, group=group, async_op=True) for x, group in order]
for work in works:
    work.wait()
print(calls[0][0], calls[1][0])
""",
    ),
    "host-sync-in-cycle": Snippet(
        "The host waits for the GPU between calls that ranks enqueue in different orders.",
        "--ranks 2 --check=nccl --device cpu",
        """\
torch.cuda.set_device(rank)
groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
for group in groups if rank == 0 else groups[::-1]:
    x = torch.ones(4, device="cuda")
    dist.all_reduce(x, group=group)
    print(x.sum().item())
""",
    ),
    "send-order": Snippet(
        "Messages only finish if the engine keeps some of them in buffers.",
        "--ranks 2 --check=nccl",
        """\
x, y = torch.ones(4), torch.empty(4)
request = dist.isend(x, 1 - rank)
dist.recv(y, 1 - rank)
request.wait()
print(y)
""",
    ),
    "not-contiguous": Snippet(
        "A tensor is not contiguous, and the engine takes contiguous ones only.",
        "--ranks 2 --check=nccl",
        """\
weight = torch.arange(6.0).reshape(2, 3)
dist.all_reduce(weight.t())
print(weight)
""",
    ),
    "dtype-refused": Snippet(
        "The engine has no such dtype, or no such operator for it.",
        "--ranks 2 --check=nccl",
        """\
tokens = torch.arange(4, dtype=torch.int16)
dist.all_reduce(tokens)
print(tokens)
""",
    ),
    "call-refused": Snippet(
        "The engine has no such call.",
        "--ranks 2 --check=nccl",
        """\
x = torch.full((4,), float(rank))
if rank == 0:
    dist.send(x, 1)
else:
    dist.recv(x)  # from any rank
print(x)
""",
    ),
    "device-refused": Snippet(
        "The group has no backend for tensors of this device.",
        "--ranks 2 --check --device cpu",
        """\
dist.init_process_group("nccl")
correct = torch.tensor(7)  # on the host
dist.all_reduce(correct)
print(correct)
""",
    ),
    "stream-race": Snippet(
        "A stream uses a tensor without waiting for the stream that writes it.",
        "--ranks 2 --check --device cpu",
        """\
torch.cuda.set_device(rank)
x, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
with torch.cuda.stream(side):  # without side.wait_stream(torch.cuda.current_stream())
    dist.all_reduce(x)
torch.cuda.current_stream().wait_stream(side)
print(x)
""",
    ),
    "unequal-parameters": Snippet(
        "Replicas differ after a step, though their gradients are equal.",
        "--ranks 2 --check",
        """\
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1))
model(torch.randn(8, 4)).square().mean().backward()
optimizer.step()
""",
    ),
    "gradient-not-reduced": Snippet(
        "A replicated parameter is stepped with a gradient that no collective has contained.",
        "--ranks 2 --check",
        """\
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with model.no_sync():
    model(torch.randn(8, 4)).square().mean().backward()
optimizer.step()
""",
    ),
    "unseeded-difference": Snippet(
        "Replicas differ from the start: each rank draws weights of its own.",
        "--ranks 2 --check",
        """\
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(8, 4)).square().mean().backward()
for each in model.parameters():
    dist.all_reduce(each.grad)
optimizer.step()
""",
    ),
    "result-unread": Snippet(
        "The result of a call is read by no rank.",
        "--ranks 2 --check",
        """\
gradient = torch.randn(4, dtype=torch.float64)
dist.all_reduce(gradient.float())
print(gradient)
""",
    ),
    "same-random-bits": Snippet(
        "Ranks that hold parts of one activation drop them out by the same random bits.",
        "--ranks 2 --check",
        """\
class RowParallel(nn.Linear):
    def forward(self, x):
        y = super().forward(dropout(x, 0.1))
        dist.all_reduce(y)
        return y


torch.manual_seed(0)
layer, x = RowParallel(4, 4), torch.randn(8, 8)
print(layer(x.chunk(2, 1)[rank]).mean())
""",
    ),
    "other-random-bits": Snippet(
        "Ranks that hold copies of one activation drop them out by different random bits.",
        "--ranks 2 --check",
        """\
class RowParallel(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        dist.all_reduce(y)
        return dropout(y, 0.1)


layer = RowParallel(4, 4)
print(layer(torch.randn(8, 4)).mean())
""",
    ),
    "group-made-by-some": Snippet(
        "Some ranks make a group, and others do not.",
        "--ranks 3 --check",
        """\
x = torch.ones(4)
if rank < 2:
    pair = dist.new_group([0, 1])
    dist.all_reduce(x, group=pair)
print(x)
""",
    ),
    "uneven-calls": Snippet(
        "A rank makes fewer calls than others.",
        "--ranks 2 --check",
        """\
for batch in torch.ones(5, 4)[rank::2]:
    dist.all_reduce(batch)
    print(batch)
""",
    ),
    "mean-of-means": Snippet(
        "Means are averaged over ranks, and are of different counts.",
        "--ranks 2 --check",
        """\
losses = torch.rand(7).tensor_split(2)[rank]
mean = losses.mean()
dist.all_reduce(mean)
print(mean / 2)
""",
    ),
    "file-race": Snippet(
        "A rank reads a file that another one writes, and no call is between.",
        "--ranks 2 --check",
        """\
if rank == 0:
    torch.save(torch.ones(4), "model.pt")
print(torch.load("model.pt"))
""",
    ),
    "result-differs": Snippet(
        "Another order of calls and turns has another result; only `--orders` looks for it.",
        "--ranks 3 --orders 5",
        """\
total, x = torch.zeros(1), torch.ones(1) * rank
if rank > 0:
    dist.send(x, 0)
else:
    for _ in range(2):
        dist.recv(x)  # from any rank
        total = 10 * total + x
    print(total)
""",
    ),
}

ELSEWHERE = frozenset(["host-read-in-forward"])
"""Kinds of programs that are not for torchrun."""


def spoken(finding: dict[str, object]) -> str:
    """What the check says of a finding: kind, site and ranks, and the text."""
    fields = {name: finding[name] for name in ("kind", "site", "ranks", "text", "call", "seen")}
    head, text, *_ = Finding(**fields).lines()
    return f"{head}\n{textwrap.fill(text, WIDTH, subsequent_indent='  ')}"


def section(kind: str) -> str:
    """The section of a kind, with what the check says of its snippet."""
    about, snippet = KINDS[kind], SNIPPETS[kind]
    rules = {"On a cluster": about.cluster, "Cure": about.cure, "Source": about.source}
    items = "\n".join(
        textwrap.fill(f"- {name}: {text}.", PAGE_WIDTH, subsequent_indent="  ")
        for name, text in rules.items()
    )
    said = snippet.run()
    if [each["kind"] for each in said.findings] != [kind]:
        raise ValueError(f"{kind}: expected it alone:\n{said.output}")
    return f"""\
### {kind}

{snippet.says}

```py
{snippet.shown}```

```text
{spoken(said.findings[0])}
```

{items}
"""


def write() -> None:
    """Write the sections of all kinds into the page."""
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name}: expected the lines {BEGIN.strip()} and {END}")
    rows = [f"| [{kind}](#{kind}) | {snippet.says} |" for kind, snippet in SNIPPETS.items()]
    table = "\n".join(["| kind | |", "|---|---|", *rows])
    sections = "\n".join(section(kind) for kind in SNIPPETS)
    PAGE.write_text(f"{head}{begin}\n{table}\n\n{sections}\n{end}{tail}")
