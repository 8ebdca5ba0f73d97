"""A process that runs cases for the bench: python -m bench.worker PEER SOCKET.

It connects to the socket, gets commands as lines of JSON, and answers each with a line. It ends
when the other side hangs up. Several of them, under mpirun, get the same commands.
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

from bench.cases import Case
from bench.machine import kernel_set
from bench.peers.base import Peer, Unserved
from bench.peers.inputs import forget


def make(name: str) -> Peer:
    """The peer of this name, and its library."""
    if "JAX" in name:
        from bench.peers import jax

        return next(peer() for peer in (jax.ShardMap, jax.Vmap, jax.Installed) if peer.name == name)
    if name.startswith("MPI"):
        from bench.peers import mpi

        return mpi.Mpi()
    if name.startswith("gpusim"):
        from bench.peers import ours

        return ours.Vmap()
    from bench.peers import torch

    return torch.Local()


def answer(peer: Peer, command: dict[str, Any]) -> Any:
    """Carry out a command."""
    match command["do"]:
        case "prepare":
            return peer.prepare(Case.of(command["case"]))
        case "run":
            return peer.run(command["repeats"])
        case "sample":
            samples = peer.sample(command["replicas"], command["positions"])
            return {str(replica): values for replica, values in samples.items()}
        case "release":
            peer.release()
            return forget()
        case "kernels":
            return kernel_set()
        case other:
            raise ValueError(f"unknown command {other!r}")


def reply(peer: Peer, command: dict[str, Any]) -> dict[str, Any]:
    """The answer, or the problem: any error of the peer is a line of the table."""
    try:
        return {"value": answer(peer, command)}
    except Unserved as reason:
        return {"problem": str(reason)}
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return {"problem": f"{type(error).__name__}: {lines[0][:160]}"}


def serve(name: str, path: str) -> None:
    """Answer commands until the other side hangs up."""
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(path)
        lines = channel.makefile("rw", encoding="utf-8")
        try:
            peer = make(name)
        except ImportError as error:
            print(json.dumps({"problem": f"not installed: {error}"}), file=lines, flush=True)
            return
        print(json.dumps({"value": "ready"}), file=lines, flush=True)
        for line in lines:
            print(json.dumps(reply(peer, json.loads(line))), file=lines, flush=True)


if __name__ == "__main__":
    serve(*sys.argv[1:3])
