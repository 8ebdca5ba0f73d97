// Random numbers of a tile's elements.
#pragma once

#include "loops.h"

// Eight of Philox's blocks, of counters `first` and on: `philox`, by 32-bit products of vectors.
typedef u64 Eight __attribute__((vector_size(64)));

inline Eight product(Eight a, u64 b, Eight& low) {
  const u64 half = 0xffffffffull, b0 = b & half, b1 = b >> 32;
  const Eight a0 = a & half, a1 = a >> 32, least = a0 * b0;
  const Eight middle = a1 * b0 + (least >> 32), other = a0 * b1 + (middle & half);
  low = other << 32 | (least & half);
  return a1 * b1 + (middle >> 32) + (other >> 32);
}

inline void philox_eight(u32* lanes, u64 seed, u64 first, u64 c1_, u64 c2_, u64 c3_, u64 stream) {
  Eight c0 = Eight{0, 1, 2, 3, 4, 5, 6, 7} + first;
  Eight c1 = Eight{} + c1_, c2 = Eight{} + c2_, c3 = Eight{} + c3_;
  u64 k0 = seed, k1 = stream;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    Eight low0, low1;
    const Eight high0 = product(c0, 0xD2E7470EE14C6C93ull, low0);
    const Eight high1 = product(c2, 0xCA5A826395121157ull, low1);
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B97F4A7C15ull;
    k1 += 0xBB67AE8584CAA73Bull;
  }
#define PAIRS(a, b, low) __builtin_shufflevector(a, b, low, 8 + low, low + 1, 9 + low)
#define STORE(part)                                                                             \
  {                                                                                             \
    const auto left = PAIRS(c0, c1, 2 * part), right = PAIRS(c2, c3, 2 * part);                 \
    const Eight words = __builtin_shufflevector(left, right, 0, 1, 4, 5, 2, 3, 6, 7);           \
    __builtin_memcpy(lanes + 16 * part, &words, sizeof words);                                  \
  }
  STORE(0) STORE(1) STORE(2) STORE(3)
#undef STORE
#undef PAIRS
}

// The random numbers of elements index, index + 1, ...; the first one's.
inline const u32* draw_lanes(u32* lanes, i64 index, int count, u64 seed, u64 step, u64 call,
                             u64 offset, u64 stream) {
  const int skipped = static_cast<int>(index & 7), blocks = (skipped + count + 7) / 8;
  const u64 first = 1 + static_cast<u64>(index >> 3);
  if (blocks == 1) {
    const Block drawn = philox(seed, first, step, call, offset, stream);
    __builtin_memcpy(lanes, drawn.words, sizeof drawn.words);
    return lanes + skipped;
  }
  for (int block = 0; block < blocks; block += 8) {
    philox_eight(lanes + 8 * block, seed, first + block, step, call, offset, stream);
  }
  return lanes + skipped;
}

// Those of a tile's elements at one step; `further` is added to the stream.
inline const u32* draw(u32* lanes, const Finish& finish, const Tile& tile, u64 step,
                       u64 further = 0) {
  const u64 offset =
      finish.batch_offsets
          ? __ldg(reinterpret_cast<const u64*>(finish.batch_offsets) + tile.entry)
          : finish.batch_offset;
  return draw_lanes(lanes, tile.index, tile.count, finish.seed, step, finish.call, offset,
                    finish.stream + further);
}
