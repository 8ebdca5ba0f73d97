"""Random numbers of the replicas: Philox4x64-10 words, and distributions made from them.
A word is a function of its counter alone, so that any word can be drawn anywhere, in any order.

The key is (seed, 1). Word i of a call is lane i % 4 of the block with the counter

    (1 + i // 4, call, replica, candidate)

where `candidate` is 0 except for the redraws of `integers` and `permutation`. Each word makes the
element of its index, for any distribution and dtype. NumPy draws the same words:
`numpy.random.Philox(key=[seed, 1], counter=[i // 4, call, replica, candidate]).random_raw(n)`
(uint64 arrays) gives those from 4 * (i // 4) on, as it adds one to the counter before each block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .formats import FLOAT32, FLOAT64
from .quantile import normal_quantile
from .rounding import round_to
from .subnormals import require_subnormals

__all__ = [
    "Stream",
    "bernoulli",
    "integers",
    "normal",
    "permutation",
    "philox",
    "rounded",
    "uniform",
]

Words = NDArray[np.uint64]

WORDS_PER_BLOCK = 4
KEY_OF_STREAMS = 1  # the key's second word; that of stochastic rounding is 0

# Measured: to set up NumPy's generator takes as long as `philox` for BLOCKS_PER_SETUP blocks, and a
# call of `philox` as long as SETUPS_PER_PHILOX set-ups.
BLOCKS_PER_SETUP = 16
SETUPS_PER_PHILOX = 100
# Blocks that `philox` computes at a time: its dozen buffers stay in a core's cache.
PHILOX_BLOCK = 8 * 1024

_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = (0xD2E7_470E_E14C_6C93, 0xCA5A_8263_9512_1157)
_KEY_STEPS = (0x9E37_79B9_7F4A_7C15, 0xBB67_AE85_84CA_A73B)
_ROUNDS = 10


def _product(words: Words, factor: Any) -> tuple[Words, Words]:
    """The high and the low word of words * factor, by schoolbook multiplication of halves."""
    factor = np.asarray(factor, np.uint64)
    factor_low, factor_high = factor & _LOW, factor >> _HALF
    low, high = words & _LOW, words >> _HALF
    middle = high * factor_low + ((low * factor_low) >> _HALF)
    other = low * factor_high + (middle & _LOW)
    return high * factor_high + (middle >> _HALF) + (other >> _HALF), words * factor


@np.errstate(over="ignore")
def philox(key: tuple[int, int], counters: tuple[Words, Words, Words, Words]) -> Words:
    """The four words of Philox4x64-10 for each counter, along a new last axis.

    `counters` are four arrays, the counter's words from the lowest up, which broadcast together.

    >>> counters = (np.uint64(1), np.uint64(0), np.uint64(0), np.uint64(0))
    >>> ours = philox((7, 1), counters)
    >>> theirs = np.random.Philox(key=np.array([7, 1], np.uint64)).random_raw(4)
    >>> np.array_equal(ours, theirs)
    True
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counters))
    for number in range(_ROUNDS):
        k0, k1 = (
            np.uint64((word + number * step) % 2**64)
            for word, step in zip(key, _KEY_STEPS, strict=True)
        )
        high0, low0 = _product(c0, _MULTIPLIERS[0])
        high1, low1 = _product(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return np.stack([c0, c1, c2, c3], axis=-1)


@dataclass(frozen=True)
class Stream:
    """The words of one call, for the replicas of the given global numbers (uint64, any shape)."""

    seed: int
    call: int
    replicas: Words

    def words(self, count: int, candidate: int = 0) -> Words:
        """The words 0 to count - 1 of every replica, in the shape (*replicas.shape, count).

        >>> Stream(0, 5, np.arange(3, dtype=np.uint64)).words(2).shape
        (3, 2)
        """
        replicas = self.replicas.reshape(-1)
        blocks = -(-count // WORDS_PER_BLOCK)
        if blocks <= BLOCKS_PER_SETUP and replicas.size >= SETUPS_PER_PHILOX:
            out = self._few_of_many(replicas, count, candidate)
        else:
            out = self._many_of_few(replicas, count, candidate)
        return out.reshape(*self.replicas.shape, count)

    def _few_of_many(self, replicas: Words, count: int, candidate: int) -> Words:
        out = np.empty((replicas.size, count), np.uint64)
        blocks = np.arange(1, 1 - (-count // WORDS_PER_BLOCK), dtype=np.uint64)
        at_once = PHILOX_BLOCK // max(1, blocks.size)
        for start in range(0, replicas.size, at_once):
            part = slice(start, start + at_once)
            drawn = self._blocks(blocks, replicas[part, None], candidate)
            out[part] = drawn.reshape(len(drawn), -1)[:, :count]
        return out

    def _many_of_few(self, replicas: Words, count: int, candidate: int) -> Words:
        out = np.empty((replicas.size, count), np.uint64)
        key = np.array([self.seed, KEY_OF_STREAMS], np.uint64)
        generator = np.random.Philox(key=key)
        state = generator.state
        for row, replica in zip(out, replicas, strict=True):
            # NumPy adds one to the counter before it computes a block.
            state["state"]["counter"] = np.array([0, self.call, replica, candidate], np.uint64)
            generator.state = state
            row[...] = generator.random_raw(count)
        return out

    def _blocks(self, block: Words, replica: Words, candidate: int) -> Words:
        call, tried = np.uint64(self.call), np.uint64(candidate)
        return philox((self.seed, KEY_OF_STREAMS), (block, call, replica, tried))  # type: ignore[arg-type]  # 0-d

    def words_at(self, replicas: Words, elements: NDArray[np.int64], candidate: int) -> Words:
        """The word of each element, elements and replicas in pairs (both one-dimensional)."""
        out = np.empty(elements.size, np.uint64)
        for start in range(0, elements.size, PHILOX_BLOCK):
            part = slice(start, start + PHILOX_BLOCK)
            block, lane = np.divmod(elements[part], WORDS_PER_BLOCK)
            drawn = self._blocks(block.astype(np.uint64) + np.uint64(1), replicas[part], candidate)
            out[part] = np.take_along_axis(drawn, lane[:, None], axis=-1)[:, 0]
        return out


def _below(high: NDArray[Any]) -> NDArray[Any]:
    return np.nextafter(high, high.dtype.type(-np.inf))


@np.errstate(all="ignore")
def uniform(words: Words, low: Any, high: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """low + u * (high - low) with u = (word >> 11) * 2**-53, in float64, rounded once to `dtype`.

    `low` and `high` are arrays of `dtype` that broadcast to the words' shape, low < high. Results
    that would reach `high` are the number of `dtype` below it.

    >>> zero, one = np.float32(0), np.float32(1)
    >>> uniform(np.array([0, 2**63, 2**64 - 1], np.uint64), zero, one, zero.dtype)
    array([0.        , 0.5       , 0.99999994], dtype=float32)
    """
    require_subnormals()
    values = (words >> np.uint64(11)).astype(np.float64)
    values *= 2.0**-53
    start, limit = low.astype(np.float64), _below(high).astype(np.float64)
    values = values * (high.astype(np.float64) - start) + start
    return rounded(np.minimum(values, limit), dtype)


@np.errstate(all="ignore")
def normal(words: Words, mean: Any, std: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """mean + std * normal_quantile(word), in float64, rounded once to `dtype`.

    `mean` and `std` are float64 arrays that broadcast to the words' shape.

    >>> normal(np.array([2**62], np.uint64), np.float64(10), np.float64(0.5), np.dtype("f2"))
    array([10.336], dtype=float16)
    """
    require_subnormals()
    return rounded(normal_quantile(words) * std + mean, dtype)


@np.errstate(all="ignore")
def rounded(values: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """float64 values in one rounding to `dtype`; themselves where that is float64."""
    if dtype in (FLOAT32, FLOAT64):
        return values.astype(dtype, copy=False)
    return round_to(values, dtype)  # the casts of ml_dtypes round twice, by way of float32


def bernoulli(words: Words, p: Any) -> NDArray[np.bool_]:
    """word < p * 2**64: true with the probability p, to within 2**-64.

    `p` is a float64 array that broadcasts to the words' shape, 0 <= p <= 1.

    >>> bernoulli(np.array([0, 2**62, 2**64 - 1], np.uint64), np.float64(0.25))
    array([ True, False, False])
    """
    certain = p >= 1.0
    threshold = (np.where(certain, 0.0, p) * 2.0**64).astype(np.uint64)
    return np.asarray((words < threshold) | certain)


@np.errstate(over="ignore")
def integers(
    stream: Stream, words: Words, replicas: Words, low: Words, last: Words, ndim: int
) -> Words:
    """Integers from low to last, both included, as 64-bit words in two's complement.

    The integer is low + word * n // 2**64 with n = last - low + 1 (Lemire, ACM TOMACS 29, 2019):
    exactly uniform, because if the product's low word is less than 2**64 mod n, the next
    candidate's word is taken instead, and so on.

    `words` (candidate 0 of `stream`), their `replicas`, `low` and `last` broadcast together. The
    last `ndim` axes of the result belong to one replica, whose elements count in C order.

    >>> stream = Stream(0, 0, np.zeros(1, np.uint64))
    >>> low, last = np.uint64(1), np.uint64(6)
    >>> integers(stream, stream.words(8), stream.replicas, low, last, ndim=1)
    array([[5, 5, 5, 3, 5, 2, 5, 4]], dtype=uint64)
    """
    span = np.asarray(last - low)
    value, accepted = _scaled(words, span)
    value = np.asarray(value + low)
    pending = np.nonzero(~accepted)
    shape = value.shape
    inner = shape[len(shape) - ndim :]
    if not pending[0].size:
        return value
    numbers = np.arange(math.prod(inner)).reshape(inner)
    refused: list[Any] = [
        np.broadcast_to(each, shape)[pending] for each in (replicas, numbers, low, span)
    ]
    candidate = 0
    while pending[0].size:
        candidate += 1
        replica, number, start, width = refused
        drawn, accepted = _scaled(stream.words_at(replica, number, candidate), width)
        value[pending] = drawn + start
        pending = tuple(axis[~accepted] for axis in pending)
        refused = [each[~accepted] for each in refused]
    return value


def _scaled(words: Words, span: Words) -> tuple[Words, NDArray[np.bool_]]:
    """word * n // 2**64 with n = span + 1, and whether the word is one that n takes."""
    n = span + np.uint64(1)
    if (span <= _LOW).all() and not (n > _LOW).any():
        middle = (words >> _HALF) * n
        middle += ((words & _LOW) * n) >> _HALF
        value = middle >> _HALF
        remainder = words * n
    else:
        value, remainder = _product(words, n)
    every = n == 0  # stands for 2**64
    if every.any():
        value = np.where(every, words, value)
    refused = np.where(every, 0, (np.uint64(0) - n) % np.where(every, np.uint64(1), n))
    return value, np.asarray(remainder >= refused)


def permutation(stream: Stream, n: int) -> NDArray[np.int64]:
    """For every replica the order that sorts its first n words, (*replicas.shape, n).

    Equal words are ordered by those of candidate 1. All orders are equally probable. (With a
    probability below n**2 / 2**129 these are equal too, and the index decides.)

    >>> permutation(Stream(0, 0, np.zeros(1, np.uint64)), 5)
    array([[3, 2, 4, 1, 0]])
    """
    words = stream.words(n)
    order = np.argsort(words, axis=-1)
    ranked = np.take_along_axis(words, order, axis=-1)
    tied = (ranked[..., 1:] == ranked[..., :-1]).any(axis=-1)
    if tied.any():
        second = stream.words(n, candidate=1)
        order[tied] = np.lexsort((second[tied], words[tied]))
    return order.astype(np.int64, copy=False)
