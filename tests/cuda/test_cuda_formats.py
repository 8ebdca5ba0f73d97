"""Every code of every format is decoded exactly by the kernels' headers, by each of their ways.
formats.cuh is compiled for the host; instructions are emulated from their definitions."""

from __future__ import annotations

import ctypes
import subprocess
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gpusim.cuda.compile import SOURCES
from tests.cuda.host_cuda.device import COMPILER, HERE, OPTIONS
from tests.cuda.host_cuda.values import same
from tests.oracles.machine_time import PATIENCE

FORMATS = ["float8_e5m2", "float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz"]

PROGRAM = """
#include "cuda_on_host.h"
#ifndef __aarch64__
#include <xmmintrin.h>
#endif
#include "formats.cuh"

template <class S>
static void decode(const unsigned char* codes, float* values, unsigned short* halves) {
  for (int code = 0; code < 256; code += 4) {
    Raw<1, 4> raw;
    memcpy(raw.words, codes + code, 4);
    for (int index = 0; index < 4; ++index) values[code + index] = value_of(S(), raw.code(index));
    if constexpr (reads_halves<S>()) {
      for (int index = 0; index < 4; index += 2) {
        u32 word = halves_of(S(), raw, index);
        memcpy(halves + code + index, &word, 4);
      }
    }
  }
}
extern "C" void flush(int on) {  // subnormal operands and results to zero
#ifdef __aarch64__
  unsigned long long control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  asm volatile("msr fpcr, %0" : : "r"(on ? control | 1ull << 24 : control & ~(1ull << 24)));
#else
  _mm_setcsr((_mm_getcsr() & ~0x8040u) | (on ? 0x8040u : 0u));
#endif
}
extern "C" void integers(int format, const unsigned char* codes, float* values) {
  for (int code = 0; code < 256; ++code) {
    u32 c = codes[code];
    values[code] = format == 0   ? value_of(Float8<2, 15, IEEE>(), c)
                   : format == 1 ? value_of(Float8<3, 7, FN>(), c)
                   : format == 2 ? value_of(Float8<2, 16, FNUZ>(), c)
                                 : value_of(Float8<3, 8, FNUZ>(), c);
  }
}
extern "C" void decode_all(int format, const unsigned char* codes, float* values,
                           unsigned short* halves) {
  if (format == 0) decode<float8_e5m2>(codes, values, halves);
  if (format == 1) decode<float8_e4m3fn>(codes, values, halves);
  if (format == 2) decode<float8_e5m2fnuz>(codes, values, halves);
  if (format == 3) decode<float8_e4m3fnuz>(codes, values, halves);
}
extern "C" void add(const unsigned short* a, const unsigned short* b, unsigned short* sums, int n) {
  for (int index = 0; index < n; index += 2) {
    u32 left, right;
    memcpy(&left, a + index, 4);
    memcpy(&right, b + index, 4);
    u32 sum = add_halves(left, right);
    memcpy(sums + index, &sum, 4);
  }
}
"""


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("formats")
    source, made = folder / "formats.cpp", folder / "formats.so"
    source.write_text(PROGRAM)
    include = [f"-I{HERE}", f"-I{SOURCES}"]
    command = [COMPILER, *OPTIONS, *include, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(made))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_is_decoded_exactly_by_every_way(headers: Any, name: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(getattr(ml_dtypes, name)).astype(np.float32)
    number = FORMATS.index(name)
    by_integers, values = np.empty(256, np.float32), np.empty(256, np.float32)
    halves = np.zeros(256, np.uint16)
    headers.integers(number, _pointer(codes), _pointer(by_integers))
    same(by_integers, expected)
    headers.decode_all(number, _pointer(codes), _pointer(values), _pointer(halves))
    same(values, expected)
    if name in ("float8_e5m2", "float8_e4m3fn"):  # by the instruction, and as an upper byte
        same(halves.view(np.float16), expected.astype(np.float16))
    assert np.array_equal(expected.astype(np.float16).astype(np.float32), expected, equal_nan=True)


@pytest.mark.parametrize("name", FORMATS)
def test_decoding_from_integers_survives_flushing(headers: Any, name: str) -> None:
    """No input or output is a subnormal float32: the processor flushes them here."""
    codes, values = np.arange(256, dtype=np.uint8), np.empty(256, np.float32)
    headers.flush(1)
    try:
        headers.integers(FORMATS.index(name), _pointer(codes), _pointer(values))
    finally:
        headers.flush(0)
    same(values, codes.view(getattr(ml_dtypes, name)).astype(np.float32))


def test_sums_of_float16_in_pairs_have_the_bits_of_sums_by_way_of_float32(headers: Any) -> None:
    random = np.random.default_rng(2)
    codes = np.arange(1 << 16, dtype=np.uint16)
    near = codes ^ random.integers(0, 1 << 11, 1 << 16).astype(np.uint16)
    for other in (random.permutation(codes), near ^ np.uint16(0x8000), codes ^ np.uint16(0x8000)):
        sums = np.empty_like(codes)
        headers.add(_pointer(codes), _pointer(other), _pointer(sums), len(codes))
        with np.errstate(all="ignore"):
            wide = codes.view(np.float16).astype(np.float32) + other.view(np.float16)
            same(sums.view(np.float16), wide.astype(np.float16))
