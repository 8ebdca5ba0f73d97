"""SUMMA: C = A B on a grid of replicas; panels of A go along the rows, of B along the columns.

python examples/gallery/summa.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import gpusim
from gpusim import P, lax

SIDE, M, K, N = 4, 24, 32, 20


@gpusim.shard_map(
    mesh=gpusim.Mesh((SIDE, SIDE), ("row", "column")),
    in_specs=(P("row", "column"), P("row", "column")),
    out_specs=P("row", "column"),
)
def summa(a: Any, b: Any) -> Any:
    """This replica's blocks: a (M / SIDE, K / SIDE), b (K / SIDE, N / SIDE)."""

    def panel(k: int, c: Any) -> Any:
        return c + lax.pbroadcast(a, "column", k) @ lax.pbroadcast(b, "row", k)

    return lax.fori_loop(0, SIDE, panel, np.zeros((a.shape[0], b.shape[1])))


def main() -> None:
    draw = np.random.default_rng(0).standard_normal
    a, b = draw((M, K)), draw((K, N))
    sent = (SIDE - 1) * (a.nbytes + b.nbytes) // SIDE**2
    print(f"({M}, {K}) x ({K}, {N}) on {SIDE} x {SIDE} replicas; each receives {sent} bytes")
    np.testing.assert_allclose(summa(a, b), a @ b, rtol=1e-9, atol=1e-12)
    print("agreed with A @ B")


if __name__ == "__main__":
    main()
