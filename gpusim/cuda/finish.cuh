// The end of a fold: division, the one rounding to the output's dtype, and the store.
// The output's format is an argument that all threads share: its branches cost once per element.
#pragma once

#include "layout.cuh"
#include "philox.cuh"

enum Rounding { UNROUNDED, TO_FLOAT16, TO_BFLOAT16, TO_FLOAT32, TO_TARGET };
enum Encoding { AS_FLOAT32, AS_FLOAT64, AS_FLOAT16, AS_BFLOAT16, AS_FLOAT8, AS_INTEGER };

// All members have 8 bytes, so that the host lays it out as the device does.
struct Finish {
  double divisor;
  i64 divides;
  i64 rounding, encoding;
  i64 drawn;  // whether the rounding is stochastic
  u64 stream, seed, step, call, batch_offset;
  u64 batch_offsets;  // the address of one offset per batch entry, or 0: all have `batch_offset`
  Target target;
  i64 from_zero;          // whether +0 is added, so that no sum is -0
  i64 bytes;              // of an integer output
  i64 wrap_bits, wrap_sign;  // the integer accumulator's width, and whether it has a sign
};

// The random numbers of a chunk's elements.
struct Draw {
  u64 stream, seed, call, batch_offset, block;

  __device__ __forceinline__ Block at(u64 step, int further = 0) const {
    return philox(seed, block + further, step, call, batch_offset, stream);
  }
};

__device__ __forceinline__ Draw draw_of(const Finish& finish, const Chunk& chunk) {
  u64 batch_offset = finish.batch_offsets ? __ldg(reinterpret_cast<const u64*>(finish.batch_offsets) + chunk.entry)
                            : finish.batch_offset;
  return {finish.stream, finish.seed, finish.call, batch_offset, 1 + static_cast<u64>(chunk.index >> 3)};
}

// A value in the output's format.
template <class C>
__device__ __forceinline__ C rounded_to(C value, i64 rounding, const Target& target, bool drawn, u32 lane) {
  if constexpr (sizeof(C) == 4) {
    if (rounding == TO_FLOAT16) {
      return drawn ? draw_float16(value, lane) : float_of_half(half_of_float(value));
    }
    if (rounding == TO_BFLOAT16) {
      return drawn ? draw_bfloat16(value, lane) : round_bfloat16(value);
    }
  } else {
    if (rounding == TO_FLOAT32) return static_cast<float>(value);
  }
  if (rounding == TO_TARGET) return round_to_target(value, target, drawn, lane);
  return value;
}

// A fold's last value: divided, and rounded to the output's format. One copy of this serves all
// elements of a chunk, which pass by in turns: it is long, and done once for all members.
template <class C>
__device__ __forceinline__ C last_value(C value, const Finish& finish, u32 lane) {
  if (finish.from_zero) value = value + static_cast<C>(0);
  if (finish.divides) value = value / static_cast<C>(finish.divisor);
  return rounded_to(value, finish.rounding, finish.target, finish.drawn, lane);
}

// Drop the first element, move the others up, and append `value`: after COUNT turns all elements are
// where they were. So a loop that is not unrolled can take registers one by one.
template <class C, int COUNT>
__device__ __forceinline__ void turn(C (&values)[COUNT], C value) {
#pragma unroll
  for (int index = 0; index + 1 < COUNT; ++index) values[index] = values[index + 1];
  values[COUNT - 1] = value;
}

template <class C>
struct IsFloat {
  static constexpr bool value = false;
};
template <>
struct IsFloat<float> {
  static constexpr bool value = true;
};
template <>
struct IsFloat<double> {
  static constexpr bool value = true;
};

// Bits beyond the accumulator's width vanish, its sign fills what is wider.
__device__ __forceinline__ u64 wrapped(u64 value, const Finish& finish) {
  int unused = 64 - static_cast<int>(finish.wrap_bits);
  return finish.wrap_sign ? static_cast<u64>(static_cast<i64>(value << unused) >> unused)
                          : value << unused >> unused;
}

// The code, in BYTES bytes, of a value: to nearest, unless one byte has to hold it.
template <int BYTES, class C>
__device__ __forceinline__ u64 encode(C value, const Finish& finish) {
  if constexpr (!IsFloat<C>::value) {
    u64 code = wrapped(value, finish);
    return BYTES == 8 ? code : code & ((1ull << (8 * BYTES % 64)) - 1);
  } else if constexpr (BYTES == 8) {
    return static_cast<u64>(__double_as_longlong(static_cast<double>(value)));
  } else {
    float single = static_cast<float>(value);
    if constexpr (BYTES == 4) return __float_as_uint(single);
    if constexpr (BYTES == 2) {
      if (finish.encoding == AS_FLOAT16) return half_of_float(single);
      return bfloats_of_floats(single, 0);
    }
    return __float_as_uint(single) & 0xff;  // code_of has been there before
  }
}

__device__ __forceinline__ int output_bytes(const Finish& finish) {
  switch (finish.encoding) {
    case AS_FLOAT32: return 4;
    case AS_FLOAT64: return 8;
    case AS_FLOAT16:
    case AS_BFLOAT16: return 2;
    case AS_FLOAT8: return 1;
    default: return static_cast<int>(finish.bytes);
  }
}

template <int BYTES, class C, int COUNT>
__device__ __forceinline__ void write(char* out, const C (&values)[COUNT], const Finish& finish,
                                      int from, int to) {
  Raw<BYTES, COUNT> raw;
  raw.clear();
  if constexpr (BYTES == 2 && IsFloat<C>::value && COUNT % 2 == 0) {  // two in an instruction
    const bool halves = finish.encoding == AS_FLOAT16;
#pragma unroll
    for (int index = 0; index < COUNT; index += 2) {
      const float low = static_cast<float>(values[index]);
      const float high = static_cast<float>(values[index + 1]);
      raw.words[index / 2] = halves ? halves_of_floats(low, high) : bfloats_of_floats(low, high);
    }
  } else {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) raw.put(index, encode<BYTES>(values[index], finish));
  }
  store_chunk<BYTES, COUNT>(out, raw, from, to);
}

// Elements from..to-1, `place` elements from the output's address.
template <class C, int COUNT>
__device__ __forceinline__ void store_values(const C (&values)[COUNT], const Finish& finish, u64 out,
                                             i64 place, int from, int to) {
  const int bytes = output_bytes(finish);
  char* at = reinterpret_cast<char*>(out) + place * bytes;
  if (bytes == 1) write<1>(at, values, finish, from, to);
  if (bytes == 2) write<2>(at, values, finish, from, to);
  if (bytes == 4) write<4>(at, values, finish, from, to);
  if (bytes == 8) write<8>(at, values, finish, from, to);
}

template <class C, int COUNT>
__device__ __forceinline__ void finish_chunk(C (&values)[COUNT], const Finish& finish,
                                             const Chunk& chunk, u64 out, int from, int to) {
  if constexpr (IsFloat<C>::value) {
    // To nearest in 16 bits or more, the store rounds.
    if (finish.divides || finish.rounding == TO_TARGET || finish.drawn || finish.from_zero ||
        finish.encoding == AS_FLOAT8) {
      Draw draw = {};
      Block block = {};
      if (finish.drawn) draw = draw_of(finish, chunk);
#pragma unroll 1
      for (int index = 0; index < COUNT; ++index) {
        if (finish.drawn && index % 8 == 0) block = draw.at(finish.step, index / 8);
        u32 lane = block.lane(static_cast<int>(chunk.index + index) & 7);
        C value = last_value(values[0], finish, lane);
        if (finish.encoding == AS_FLOAT8) {
          value = __uint_as_float(code_of(static_cast<float>(value), finish.target));
        }
        turn(values, value);
      }
    }
  }
  store_values(values, finish, out, chunk.out_offset, from, to);
}
