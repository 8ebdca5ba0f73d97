"""A distributed FFT in four steps: local FFTs, twiddle factors, one all_to_all, local FFTs.

python examples/gallery/fft.py spectrum.svg
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gpusim
from gpusim import P, lax
from gpusim.figures import COLOURS, figure

REPLICAS, ROWS, COLUMNS = 8, 32, 64
LENGTH = ROWS * COLUMNS


@gpusim.shard_map(mesh=gpusim.Mesh(REPLICAS, "i"), in_specs=P(None, "i"), out_specs=P("i"))
def transform(x: Any) -> Any:
    """From some columns of x (ROWS, COLUMNS) to some rows of its transform."""
    width = x.shape[1]
    column = lax.axis_index("i") * width + np.arange(width)
    twiddles = np.exp(-2j * np.pi / LENGTH * np.arange(ROWS)[:, None] * column)
    x = np.fft.fft(x, axis=0) * twiddles
    x = lax.all_to_all(x, "i", split_axis=0, concat_axis=1, tiled=True)
    return np.fft.fft(x, axis=1)


def main(picture: str | None = None) -> None:
    time = np.arange(LENGTH) / LENGTH
    noise = np.random.default_rng(0).standard_normal(LENGTH)
    signal = np.sin(2 * np.pi * 123 * time) + 0.5 * np.sin(2 * np.pi * 456 * time) + noise
    # element ROWS * k2 + k1 of the spectrum is in row k1 and column k2
    spectrum = transform(signal.reshape(ROWS, COLUMNS)).T.reshape(-1)
    power = np.abs(spectrum[: LENGTH // 2]) ** 2
    strongest = sorted(np.argsort(power)[-2:].tolist())
    print(f"{LENGTH} points on {REPLICAS} replicas; the strongest frequencies are {strongest}")
    np.testing.assert_allclose(spectrum, np.fft.fft(signal), rtol=1e-9, atol=1e-9)
    print("agreed with np.fft.fft")
    if picture:
        with figure(picture, height=2.2) as ax:
            ax.plot(power / LENGTH**2, color=COLOURS[0], lw=0.8)
            ax.set(xlabel="frequency", ylabel="power", title="A spectrum, from 8 replicas")


if __name__ == "__main__":
    main(*sys.argv[1:])
