"""The replicas and the host of each instance, and its PopDist variables."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from gpusim.runtime.environment import IPUS, LOCAL, LOCAL_INSTANCE, OFFSET, TOTAL, UNIFORM, spread

__all__ = ["Instance", "LaunchLayout", "hosts_of", "lay_out"]

MAX_HOSTS = 10_000  # of a range


@dataclass(frozen=True)
class Instance:
    """One process: its host, its index on the host, and the block of replicas that it holds."""

    host: str | None
    local_index: int
    replicas: int
    offset: int


@dataclass(frozen=True)
class LaunchLayout:
    """All instances of a run, in order."""

    instances: tuple[Instance, ...]
    ipus_per_replica: int

    @property
    def replicas(self) -> int:
        return sum(instance.replicas for instance in self.instances)

    @property
    def uniform(self) -> bool:
        """Whether all instances hold equally many replicas."""
        return len({instance.replicas for instance in self.instances}) == 1

    @property
    def ipus_per_host(self) -> int:
        """The IPUs that a host needs at most: equal blocks for its instances, powers of two."""
        block = max(instance.replicas for instance in self.instances) * self.ipus_per_replica
        fullest = max(Counter(instance.host for instance in self.instances).values())
        return power_of_two(power_of_two(block) * fullest)

    def variables(self, index: int) -> dict[str, str]:
        """PopDist's variables for an instance."""
        instance = self.instances[index]
        return {
            TOTAL: str(self.replicas),
            IPUS: str(self.ipus_per_replica),
            LOCAL: str(instance.replicas),
            UNIFORM: str(int(self.uniform)),
            OFFSET: str(instance.offset),
            LOCAL_INSTANCE: str(instance.local_index),
        }


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()


def lay_out(
    instances: int, replicas: int | None, ipus_per_replica: int, hosts: tuple[str, ...] = ()
) -> LaunchLayout:
    """Divide replicas among instances, and instances among hosts, both in contiguous blocks.

    Without `replicas`, each instance holds one. ValueError for fewer replicas than instances, and
    for fewer instances than hosts.

    >>> [(i.host, i.replicas, i.offset) for i in lay_out(3, 7, 1, ("a", "b")).instances]
    [('a', 3, 0), ('a', 2, 3), ('b', 2, 5)]
    """
    replicas = instances if replicas is None else replicas
    if replicas < instances:
        raise ValueError(
            f"--num-replicas {replicas}: expected at least one for each of "
            f"--num-instances {instances}"
        )
    if instances < len(hosts):
        raise ValueError(
            f"--num-instances {instances}: expected at least one for each of "
            f"{len(hosts)} hosts, --host {','.join(hosts)}"
        )
    counts = spread(replicas, instances)
    on_hosts = spread(instances, len(hosts) or 1)
    indices = [(h, i) for h, n in zip(hosts or (None,), on_hosts, strict=True) for i in range(n)]
    return LaunchLayout(
        tuple(
            Instance(host, local_index, counts[i], sum(counts[:i]))
            for i, (host, local_index) in enumerate(indices)
        ),
        ipus_per_replica,
    )


def hosts_of(text: str) -> tuple[str, ...]:
    """The hosts that --host names: separated by commas, with ranges in brackets.

    ValueError for an empty or repeated name, and for an invalid range.

    >>> hosts_of("pod,node[08-10,12]")
    ('pod', 'node08', 'node09', 'node10', 'node12')
    """
    found: list[str] = []
    for name in re.split(r",(?![^\[]*\])", text):
        found += expand(name.strip(), text)
    twice = [name for name, times in Counter(found).items() if times > 1]
    if twice:
        raise ValueError(f"--host {text!r}: {twice[0]} is named twice")
    return tuple(found)


def expand(name: str, text: str) -> list[str]:
    """The names that a name with brackets stands for."""
    match = re.fullmatch(r"([^\[\]\s]*)\[([\d,-]+)\]([^\[\]\s]*)", name)
    if match is None:
        if not re.fullmatch(r"[^\[\]\s]+", name):
            raise ValueError(f"--host {text!r}: expected names like H1,H2 or H[1-3,5]")
        return [name]
    before, ranges, after = match.groups()
    numbers: list[str] = []
    for piece in ranges.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", piece)
        if ends is None:
            raise ValueError(f"--host {text!r}: expected a number or a range, got {piece!r}")
        first, last = ends[1], ends[2] or ends[1]
        if not 0 <= int(last) - int(first) < MAX_HOSTS:
            raise ValueError(f"--host {text!r}: {piece} is not an ascending range")
        numbers += [str(i).zfill(len(first)) for i in range(int(first), int(last) + 1)]
    return [f"{before}{number}{after}" for number in numbers]
