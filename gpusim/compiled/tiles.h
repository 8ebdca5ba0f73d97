// The kernels on a CPU: fold.cu's sums and products, and round.cu, over the same arguments.
// A tile of a row is folded over all members before the next: its total stays in the nearest cache,
// and each member is read once. All loops over a tile's elements are without branches, for vectors.
#pragma once

#include "cuda_on_cpu.h"
#include "fold.cuh"

// Elements of a loop do not depend on each other: what it writes may be what it reads.
#define FOR_EACH(k, count) \
  _Pragma("clang loop vectorize(assume_safety)") for (i64 k = 0; k < (count); ++k)

// Random numbers of a tile, of whose elements build.py gives the number: whole blocks, eight of
// them at once.
const int LANES = TILE + 8 + 64;

// Elements of one row, side by side in the value and in the output.
struct Tile {
  i64 index;   // of the first, in the whole value
  int count;   // of elements, at most TILE
  i64 offset;  // bytes from a member's address to the first
  i64 place;   // elements from the output's address to the first
  i64 entry;   // the batch entry
};

template <bool CHOICE, class A, class B>
struct Choose {
  typedef A type;
};
template <class A, class B>
struct Choose<false, A, B> {
  typedef B type;
};

typedef _Float16 Half;

template <int BYTES>
struct Code;
template <>
struct Code<1> {
  typedef u8 type;
};
template <>
struct Code<2> {
  typedef u16 __attribute__((aligned(1), may_alias)) type;
};
template <>
struct Code<4> {
  typedef u32 __attribute__((aligned(1), may_alias)) type;
};
template <>
struct Code<8> {
  typedef u64 __attribute__((aligned(1), may_alias)) type;
};

// The value of a code.
template <class C, class S>
inline C decoded(S, typename Code<S::BYTES>::type code) {
  return static_cast<C>(value_of(S(), code));
}
// As float16, a shift and a product by a power of two, both exact, read most 8-bit formats. The
// product is a float32, as processors without float16 arithmetic would round and convert it again.
template <class C, class S>
  requires(sizeof(C) == 2 && S::BYTES == 1 && S::BIAS < 15)
inline float decoded(S, u8 code) {
  const int shift = 10 - S::FRACTION, highest = 0x7f << shift;
  const int bits = static_cast<signed char>(code) * (1 << shift) & (highest | 0x8000);
  bool nan = false;
  if constexpr (S::TOP == FN) nan = (bits & highest) == highest;
  if constexpr (S::TOP == FNUZ) nan = bits == 0x8000;
  const u16 half = static_cast<u16>(nan ? 0x7e00 : bits);
  return float_of_half(half) * power_of_two(15 - S::BIAS);
}

// What a step adds: a member's codes as they lie in memory, or values.
template <class S, class C>
struct Codes {
  const typename Code<S::BYTES>::type* at;
  inline auto operator[](int index) const { return decoded<C>(S(), at[index]); }
};
template <class C>
struct Values {
  const C* at;
  inline C operator[](int index) const { return at[index]; }
};

// float16 sums by float32's operations, without conversions of the total.
//
// A sum s of two float16 is a multiple of 2^-24 in float32, and u = 8192 s - s and 8192 s - u, each
// rounded once, leave s rounded to float16's 11 bits: tried for every s. All numbers have the factor
// 2^-15, which the operations that there are apply: bit 30 is then set in what is beyond float16's
// largest, in infinity and in NaN, and such a tile is folded again by conversions.
#if (defined(__FMA__) || defined(__ARM_FEATURE_FMA)) && !defined(__AVX512FP16__) && \
    !defined(__ARM_FEATURE_FP16_VECTOR_ARITHMETIC)
const bool SCALED_SUMS = true;
#else
const bool SCALED_SUMS = false;  // float16 has operations of its own, or float32 lacks this one
#endif

// A code as a float32 of which FACTOR makes the scaled value; bit 7 of `doubt` is set for NaN, where
// the float32 is a number.
template <class S>
struct Scaled;
template <>
struct Scaled<float16> {
  static constexpr float FACTOR = 0x1p-15f;
  static float of(u16 code) { return float_of_half(code); }
  static u8 doubt(u16) { return 0; }
};
template <>
struct Scaled<float8_e5m2> {
  static constexpr float FACTOR = 0x1p-15f;
  static float of(u8 code) { return float_of_half(static_cast<u16>(code << 8)); }
  static u8 doubt(u8) { return 0; }
};
template <class S>
  requires(S::BYTES == 1 && S::TOP != IEEE)
struct Scaled<S> {
  static constexpr float FACTOR = power_of_two(112 - S::BIAS);
  static float of(u8 code) {
    const int shift = 23 - S::FRACTION;
    const u32 whole = static_cast<u32>(static_cast<signed char>(code));
    return __uint_as_float(whole << shift & (0x80000000u | 0x7fu << shift));
  }
  static u8 doubt(u8 code) {
    return (S::TOP == FN ? (code | 0x80) == 0xff : code == 0x80) ? 0x80 : 0;
  }
};

// Formats whose rounding takes no branch: signed, with subnormal numbers, and with the distance of
// these and its inverse among float32's normal numbers. The others are rounded one by one.
struct Vector {
  int dropped;  // bits that go from a normal number's significand
  u32 normal;   // the bits of the least normal number
  float ulp, inverse;  // of subnormal numbers
  float largest, beyond;
  bool negative_zero;
};

inline bool is_vector(const Target& target) {
  const i64 least = target.min_exponent, ulp = least - target.fraction_bits;
  return target.fraction_bits > 0 && target.fraction_bits < 23 && (ulp >= -120 || least == -126) &&
         least < 100 && target.lowest == -target.largest &&
         target.smallest <= power<double>(static_cast<int>(ulp));
}

inline Vector vector_of(const Target& target) {
  const int fraction = static_cast<int>(target.fraction_bits);
  const int least = static_cast<int>(target.min_exponent);
  const bool alike = least == -126;  // subnormal numbers are rounded as float32's others
  return {23 - fraction,
          alike ? 0 : static_cast<u32>(least + 127) << 23,
          alike ? 0 : power<float>(least - fraction),
          alike ? 0 : power<float>(fraction - least),
          static_cast<float>(target.largest),
          __uint_as_float(target.has_infinity ? 0x7f800000u : 0x7fc00000u),
          target.has_negative_zero != 0};
}

// A target, and how it is rounded to.
struct Rounder {
  const Target& target;
  const bool by_vector, single, half;
  const Vector vector;

  explicit Rounder(const Target& given)
      : target(given),
        by_vector(is_vector(given)),
        single(given.fraction_bits == 23 && given.min_exponent == -126 && given.has_infinity &&
               given.lowest == -given.largest && given.smallest < 0x1p-148),
        half(by_vector && given.fraction_bits == 10 && given.min_exponent == -14 &&
             given.largest == 65504 && given.has_infinity && given.has_negative_zero),
        vector(by_vector ? vector_of(given) : Vector{}) {}
};

template <bool DRAWN>
inline float round_vector(float value, const Vector& target, u32 lane) {
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const u32 ulp = 1u << target.dropped, rest = magnitude & (ulp - 1);
  const float positive = __uint_as_float(magnitude);
  u32 whole;
  float small;
  if constexpr (DRAWN) {
    whole = (magnitude - rest) + (lane < rest << (32 - target.dropped) ? ulp : 0);
    // Of a number without subnormals' neighbours the next lines are not used.
    const float bounded = magnitude < target.normal ? positive : 0.0f;
    const float units = bounded * target.inverse;
    const u32 kept = static_cast<u32>(units);
    const float fraction = units - static_cast<float>(kept);
    const u32 more = lane < static_cast<u32>(fraction * 4294967296.0f);
    small = static_cast<float>(kept + more) * target.ulp;
  } else {
    const u32 odd = magnitude >> target.dropped & 1;
    whole = (magnitude + (ulp / 2 - 1) + odd) & ~(ulp - 1);
    const float shift = target.ulp * 8388608.0f;  // whose own distance is `ulp`
    small = (positive + shift) - shift;
  }
  float result = magnitude < target.normal ? small : __uint_as_float(whole);
  result = result > target.largest ? target.beyond : result;
  u32 sign = bits & 0x80000000u;
  sign = target.negative_zero || result != 0.0f ? sign : 0;
  result = __uint_as_float(__float_as_uint(result) | sign);
  return magnitude > 0x7f800000u ? value : result;
}

// As draw_float16, without branches.
inline float draw_half(float value, u32 lane) {
  const Vector half = {13, 0x38800000u, 0x1p-24f, 0x1p24f, 65504.0f, __builtin_inff(), true};
  return round_vector<true>(value, half, lane);
}

template <class C, bool DRAWN>
inline void round_all(C* values, int count, const Rounder& rounding, const u32* lanes) {
  if (sizeof(C) == 4 && !DRAWN && rounding.half) {
    FOR_EACH(k, count) values[k] = float_of_half(half_of_float(static_cast<float>(values[k])));
  } else if (sizeof(C) == 4 && rounding.by_vector) {
    const Vector vector = rounding.vector;
    FOR_EACH(k, count) {
      values[k] = round_vector<DRAWN>(static_cast<float>(values[k]), vector, DRAWN ? lanes[k] : 0);
    }
  } else if (!DRAWN && rounding.single) {
    FOR_EACH(k, count) values[k] = static_cast<float>(values[k]);
  } else {
    const Target target = rounding.target;
    for (int k = 0; k < count; ++k) {
      values[k] = round_to_target(values[k], target, DRAWN, DRAWN ? lanes[k] : 0);
    }
  }
}

// The type of totals: float16 itself, where it has the members and all sums. An operation on two
// float16, rounded once, has the bits of float32's rounded to float16: 24 >= 2 * 11 + 2.
template <class S, class C, int STEP, bool DRAWN>
struct Total {
  typedef C type;
};
template <class S>
struct Total<S, float, FLOAT16, false> {
  typedef Choose<is_in_float16<S>(), Half, float>::type type;
};

template <int STEP, bool DRAWN, class C>
inline C rounded(C value, u32 lane) {
  if constexpr (sizeof(C) == 2) {
    return value;
  } else if constexpr (STEP == FLOAT16) {
    return DRAWN ? draw_half(value, lane) : float_of_half(half_of_float(value));
  } else if constexpr (STEP == BFLOAT16) {
    return DRAWN ? draw_bfloat16(value, lane) : round_bfloat16(value);
  } else {
    return value;
  }
}

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

// Those of a tile's elements at one step.
inline const u32* draw(u32* lanes, const Finish& finish, const Tile& tile, u64 step) {
  const u64 offset =
      finish.batch_offsets
          ? __ldg(reinterpret_cast<const u64*>(finish.batch_offsets) + tile.entry)
          : finish.batch_offset;
  return draw_lanes(lanes, tile.index, tile.count, finish.seed, step, finish.call, offset,
                    finish.stream);
}

template <class S, class C>
inline void load(C* values, const char* at, i64 stride, int count) {
  if (stride == S::BYTES) {
    const Codes<S, C> codes = {reinterpret_cast<const typename Code<S::BYTES>::type*>(at)};
    FOR_EACH(k, count) values[k] = static_cast<C>(codes[k]);
  } else {
    FOR_EACH(k, count) {
      values[k] = static_cast<C>(value_of(S(), load_element<S::BYTES>(at + k * stride)));
    }
  }
}

// The codes of an 8-bit format, to which values are rounded to nearest as by `round_vector`.
template <class C>
inline void encode(const C* values, char* at, const Target& target, const Vector& vector,
                   int count) {
  const u32 least = vector.normal - 0x00800000u, dropped = vector.dropped;
  const u32 largest = (__float_as_uint(vector.largest) - least) >> dropped;
  const u32 nan = static_cast<u32>(target.nan_code);
  const u32 infinity = static_cast<u32>(target.infinity_code);
  const u32 half = (1u << dropped) / 2 - 1, zero_sign = vector.negative_zero ? 0x80 : 0;
  const float shift = vector.ulp * 8388608.0f;  // whose own distance is `ulp`
  const bool has_infinity = target.has_infinity;
  FOR_EACH(k, count) {
    const u32 bits = __float_as_uint(static_cast<float>(values[k]));
    const u32 magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80;
    const u32 odd = magnitude >> dropped & 1;
    const u32 normal = (magnitude + half + odd - least) >> dropped;
    const u32 subnormal =
        __float_as_uint(__uint_as_float(magnitude) + shift) - __float_as_uint(shift);
    u32 code = magnitude < vector.normal ? subnormal : normal;
    const bool beyond = code > largest, is_nan = magnitude > 0x7f800000u;
    code = (beyond ? infinity : code) | (code ? sign : sign & zero_sign);
    at[k] = static_cast<char>(is_nan || (beyond && !has_infinity) ? nan : code);
  }
}

// The same for finite values of float16. A product, exact, gives them the format's exponents: the
// code is then the upper bits, also of a subnormal number.
template <bool INFINITE, bool SIGNED_ZERO>
inline void encode_finite(const float* values, char* at, const Target& target, int count) {
  const int dropped = 23 - static_cast<int>(target.fraction_bits);
  const float scale = power<float>(-126 - static_cast<int>(target.min_exponent));
  const u32 largest = __float_as_uint(static_cast<float>(target.largest) * scale) >> dropped;
  const u32 beyond = static_cast<u32>(INFINITE ? target.infinity_code : target.nan_code);
  const u32 half = (1u << dropped) / 2 - 1, signless = 0x7fffffffu >> dropped;
  FOR_EACH(k, count) {
    const u32 bits = __float_as_uint(values[k] * scale);
    const u32 whole = (bits + half + (bits >> dropped & 1)) >> dropped, code = whole & signless;
    const u32 sign = whole >> (24 - dropped) & (SIGNED_ZERO || code ? 0x80 : 0);
    u32 all = (code > largest ? beyond : code) | sign;
    if (!INFINITE) all = code > largest ? beyond : code | sign;
    at[k] = static_cast<char>(all);
  }
}

inline void encode_finite(const float* values, char* at, const Target& target, int count) {
  if (target.has_infinity) {
    encode_finite<true, true>(values, at, target, count);
  } else if (target.has_negative_zero) {
    encode_finite<false, true>(values, at, target, count);
  } else {
    encode_finite<false, false>(values, at, target, count);
  }
}

// The end of a fold: division, the one rounding to the output's format, and the store. `halves`:
// the values are finite, and float16 has them.
template <class C>
inline void store(C* values, const Finish& finish, const Rounder& rounder, const Tile& tile,
                  u64 out, u32* buffer, bool halves = false) {
  const int count = tile.count;
  const bool drawn = finish.drawn;
  if (finish.from_zero) {
    FOR_EACH(k, count) values[k] = values[k] + static_cast<C>(0);
  }
  if (finish.divides) {
    const C divisor = static_cast<C>(finish.divisor);
    FOR_EACH(k, count) values[k] = values[k] / divisor;
  }
  const u32* lanes = drawn ? draw(buffer, finish, tile, finish.step) : buffer;
  if constexpr (sizeof(C) == 8) {
    if (finish.rounding == TO_FLOAT32) {
      FOR_EACH(k, count) values[k] = static_cast<float>(values[k]);
    }
  } else if (finish.rounding == TO_FLOAT16) {
    if (drawn) {
      FOR_EACH(k, count) values[k] = rounded<FLOAT16, true>(values[k], lanes[k]);
    }  // else as it is stored
  } else if (finish.rounding == TO_BFLOAT16) {
    if (drawn) {
      FOR_EACH(k, count) values[k] = rounded<BFLOAT16, true>(values[k], lanes[k]);
    } else {
      FOR_EACH(k, count) values[k] = rounded<BFLOAT16, false>(values[k], 0);
    }
  }
  const bool encoded = finish.encoding == AS_FLOAT8 && sizeof(C) == 4 && rounder.by_vector;
  if (finish.rounding == TO_TARGET && (drawn || !encoded)) {
    if (drawn) {
      round_all<C, true>(values, count, rounder, lanes);
    } else {
      round_all<C, false>(values, count, rounder, lanes);
    }
  }
  char* at = reinterpret_cast<char*>(out) + tile.place * output_bytes(finish);
  typename Code<2>::type* words = reinterpret_cast<typename Code<2>::type*>(at);
  switch (finish.encoding) {
    case AS_FLOAT64:
      FOR_EACH(k, count) {
        reinterpret_cast<typename Code<8>::type*>(at)[k] =
            static_cast<u64>(__double_as_longlong(static_cast<double>(values[k])));
      }
      return;
    case AS_FLOAT32:
      FOR_EACH(k, count) {
        reinterpret_cast<typename Code<4>::type*>(at)[k] =
            __float_as_uint(static_cast<float>(values[k]));
      }
      return;
    case AS_FLOAT16:
      FOR_EACH(k, count) words[k] = half_of_float(static_cast<float>(values[k]));
      return;
    case AS_BFLOAT16:
      FOR_EACH(k, count) {
        words[k] = static_cast<u16>(__float_as_uint(static_cast<float>(values[k])) >> 16);
      }
      return;
  }
  if (halves && !finish.divides && rounder.by_vector && finish.target.min_exponent < 0) {
    encode_finite(reinterpret_cast<const float*>(values), at, finish.target, count);
  } else if (rounder.by_vector) {
    encode(values, at, finish.target, rounder.vector, count);
  } else {  // an 8-bit format has the value
    const Target target = finish.target;
    for (int k = 0; k < count; ++k) at[k] = code_of(static_cast<float>(values[k]), target);
  }
}

// Members that are read side by side: they come faster than one after the other, as each begins a
// page, in which the processor's prefetching begins anew. Arithmetic on more is not in registers.
template <class S>
constexpr int ROWS = S::BYTES == 1 ? 4 : 8;
template <int N>
struct Count {
  static constexpr int value = N;
};

// The fold of one tile over all members.
template <class S, class C, int STEP, bool DRAWN>
struct Job {
  const Fold& fold;
  const Rounder& rounder;  // to the accumulator
  const Tile& tile;
  u32* buffer;  // of random numbers
  const Members members = members_of(fold.layout);

  const char* at(int member) const { return members.at(member, tile.offset); }

  // Fetch the member after this one. With the short tiles of 8-bit formats the processor's own
  // prefetching, which begins anew at each, comes too late.
  inline void fetch_next(int member) const {
    if constexpr (S::BYTES == 1) {
      const char* next = member + 1 < fold.layout.members ? at(member + 1) : at(0) + tile.count;
      for (int k = 0; k < tile.count; k += 64) __builtin_prefetch(next + k);
    }
  }

  // left op right, rounded, as step `step`. `out` may be `left`.
  template <class Right>
  inline void combine(const C* left, Right right, C* out, u64 step) const {
    const int count = tile.count;
    const u32* lanes = DRAWN ? draw(buffer, fold.finish, tile, step) : buffer;
    if (fold.op == SUM) {
      FOR_EACH(k, count) {
        out[k] = rounded<STEP, DRAWN>(static_cast<C>(left[k] + right[k]), DRAWN ? lanes[k] : 0);
      }
    } else {
      FOR_EACH(k, count) {
        out[k] = rounded<STEP, DRAWN>(static_cast<C>(left[k] * right[k]), DRAWN ? lanes[k] : 0);
      }
    }
    if constexpr (STEP == TARGET) round_all<C, DRAWN>(out, count, rounder, lanes);
  }

  // The same with a member at the right.
  inline void combine_member(const C* left, int member, C* out, u64 step) const {
    if (fold.layout.stride == S::BYTES) {
      fetch_next(member);
      typedef typename Code<S::BYTES>::type T;
      combine(left, Codes<S, C>{reinterpret_cast<const T*>(at(member))}, out, step);
    } else {
      C values[TILE];
      load_member(values, member);
      combine(left, Values<C>{values}, out, step);
    }
  }

  // The member that comes as the `number`th from this one on, and around.
  inline int member(int start, int number) const {
    const int members = static_cast<int>(fold.layout.members);
    return start + number < members ? start + number : start + number - members;
  }

  // Calls function(Count, member, whether it is the fold's first) for all members from this one on,
  // some at a time.
  template <class Function>
  inline void in_groups(int start, Function function) const {
    const int members = static_cast<int>(fold.layout.members);
    for (int seen = 0; seen < members;) {
      const int next = member(start, seen), left = members - seen;
      const bool first = !seen && !fold.before;
      if (left >= ROWS<S>) {
        function(Count<ROWS<S>>(), next, first);
        seen += ROWS<S>;
      } else if (left >= 4) {
        function(Count<4>(), next, first);
        seen += 4;
      } else {
        function(Count<1>(), next, first);
        ++seen;
      }
    }
  }

  // total op COUNT members from this one on, to nearest; in place of `total` if it is the FIRST.
  template <int COUNT, bool FIRST>
  inline void combine_rows(C* total, int start) const {
    typedef typename Code<S::BYTES>::type T;
    const int count = tile.count;
    Codes<S, C> rows[COUNT];
    for (int n = 0; n < COUNT; ++n) rows[n].at = reinterpret_cast<const T*>(at(member(start, n)));
    if (fold.op == SUM) {
      FOR_EACH(k, count) {
        C value = FIRST ? static_cast<C>(rows[0][k]) : total[k];
#pragma unroll
        for (int n = FIRST; n < COUNT; ++n) {
          value = rounded<STEP, false>(static_cast<C>(value + rows[n][k]), 0);
        }
        total[k] = value;
      }
    } else {
      FOR_EACH(k, count) {
        C value = FIRST ? static_cast<C>(rows[0][k]) : total[k];
#pragma unroll
        for (int n = FIRST; n < COUNT; ++n) {
          value = rounded<STEP, false>(static_cast<C>(value * rows[n][k]), 0);
        }
        total[k] = value;
      }
    }
  }

  // total + COUNT members from this one on, scaled; whether all is below float16's end.
  template <int COUNT, bool FIRST>
  inline bool add_scaled(float* total, int start) const {
    typedef typename Code<S::BYTES>::type T;
    const int count = tile.count;
    const T* rows[COUNT];
    for (int n = 0; n < COUNT; ++n) rows[n] = reinterpret_cast<const T*>(at(member(start, n)));
    u32 bits = 0;
    u8 doubt = 0;
    FOR_EACH(k, count) {
      float sum = FIRST ? Scaled<S>::of(rows[0][k]) * Scaled<S>::FACTOR : total[k];
      if (FIRST) {
        bits |= __float_as_uint(sum);
        doubt |= Scaled<S>::doubt(rows[0][k]);
      }
#pragma unroll
      for (int n = FIRST; n < COUNT; ++n) {
        sum = __builtin_fmaf(Scaled<S>::of(rows[n][k]), Scaled<S>::FACTOR, sum);
        sum = __builtin_fmaf(sum, 8192, -__builtin_fmaf(sum, 8192, -sum));
        bits |= __float_as_uint(sum);
        doubt |= Scaled<S>::doubt(rows[n][k]);
      }
      total[k] = sum;
    }
    return !(bits & 0x40000000u) && !(doubt & 0x80);
  }

  // `in_sequence` for sums, in float32. False where these are not float16's.
  bool sum_scaled(float* total, int start) const {
    const int count = tile.count;
    if (fold.op != SUM || fold.before || fold.layout.stride != S::BYTES) return false;
    bool below = true;
    in_groups(start, [this, total, &below](auto members, int next, bool first) {
      const int some = members.value;
      below &= first ? add_scaled<some, true>(total, next) : add_scaled<some, false>(total, next);
    });
    FOR_EACH(k, count) total[k] *= 0x1p15f;
    return below;
  }

  void load_member(C* values, int member) const {
    load<S>(values, at(member), fold.layout.stride, tile.count);
  }

  void load_partial(C* total) const {
    if constexpr (sizeof(C) == 8) {
      load_partial<8>(total);
    } else {
      if (fold.stored_bytes == 4) load_partial<4>(total);
      if (fold.stored_bytes == 2) load_partial<2>(total);
      if constexpr (S::BYTES == 1) {
        if (fold.stored_bytes == 1) load_partial<1>(total);
      }
    }
  }
  template <int BYTES>
  void load_partial(C* total) const {
    const char* at = reinterpret_cast<const char*>(fold.partial) + tile.place * BYTES;
    const int count = tile.count;
    FOR_EACH(k, count) {
      typedef typename Choose<sizeof(C) == 8, double, float>::type Float;
      const u64 code = load_element<BYTES>(at + k * BYTES);
      total[k] = static_cast<C>(value_of_partial<S, Float, BYTES>(code, fold));
    }
  }

  // Members start, start + 1, ... and around, one after the other.
  void in_sequence(C* total, int start) const {
    if (fold.before) load_partial(total);
    if constexpr (!DRAWN && STEP != TARGET) {
      if (fold.layout.stride == S::BYTES) {
        in_groups(start, [this, total](auto members, int next, bool first) {
          const int some = members.value;
          first ? combine_rows<some, true>(total, next) : combine_rows<some, false>(total, next);
        });
        return;
      }
    }
    if (!fold.before) load_member(total, start);
    for (i64 seen = !fold.before; seen < fold.layout.members; ++seen) {
      combine_member(total, member(start, seen), total, fold.before + seen);
    }
  }

  // Neighbours in pairs, level by level. Slot k holds a subtree of 2**k members, like a binary
  // counter; the carries of a member end in the slot of the last one.
  void in_a_tree(C* total, C* slots) const {
    const int count = static_cast<int>(fold.layout.members);
    for (int member = 0; member < count; ++member) {
      const bool last = member + 1 == count;
      const int carries = last ? 64 : __builtin_ctz(~static_cast<u32>(member));
      const C* right = nullptr;  // none: the member itself
      int level = 0;
      for (int index = member; last ? index : index & 1; index >>= 1, ++level) {
        if (!(index & 1)) continue;  // an odd one out goes up
        const C* left = slots + static_cast<i64>(level) * TILE;
        C* to = level + 1 == carries ? slots + static_cast<i64>(carries) * TILE : total;
        const u64 step = tree_step(fold, fold.node, level, index >> 1);
        if (right) {
          combine(left, Values<C>{right}, to, step);
        } else {
          combine_member(left, member, to, step);
        }
        right = to;
      }
      if (!right) load_member(last ? total : slots, member);
    }
  }

  // The additions of any graph, by a machine with a stack.
  void by_graph(C* total, C* stack) const {
    const i64* graph = reinterpret_cast<const i64*>(fold.graph);
    C* top = stack;
    for (i64 next = 0; next < fold.instructions; ++next) {
      const i64 instruction = graph[next];
      if (instruction >= 0) {
        load_member(top, static_cast<int>(instruction));
        top += TILE;
      } else {
        top -= TILE;
        C* left = top - TILE;
        combine(left, Values<C>{top}, left, static_cast<u64>(-instruction));
      }
    }
    FOR_EACH(k, tile.count) total[k] = stack[k];
  }
};

// The first index behind a ring's block.
inline i64 block_end(const Fold& fold, i64 index, int block) {
  i64 i = fold.parts == 2 ? index >> 1 : index, end;
  if (fold.ring == LISTED_RING) {
    end = reinterpret_cast<const i64*>(fold.edges)[block + 1];
  } else if (fold.ring == SLICED_RING) {
    end = (i / fold.slice + 1) * fold.slice;
  } else {
    const i64 length = fold.total / fold.layout.members;
    const i64 longer = fold.total - length * fold.layout.members, passed = block + 1;
    end = passed * length + (passed < longer ? passed : longer);
  }
  return end * fold.parts;
}

template <class S, class C, int STEP, bool DRAWN>
inline void fold_tile(const Fold& fold, const Rounder& step, const Rounder& last, Tile tile,
                      void* scratch) {
  typedef typename Total<S, C, STEP, DRAWN>::type T;
  T total[TILE];
  C values[TILE];
  u32 buffer[LANES];
  const bool ring = fold.ring != NO_RING;
  const i64 end = tile.index + tile.count;
  while (tile.index < end) {  // a chain for each block of a ring
    int start = 0;
    i64 stop = end;
    if (ring) {
      const int block = ring_block(fold, tile.index);
      const i64 edge = block_end(fold, tile.index, block);
      start = ring_start(fold, block);
      stop = edge < end ? edge : end;
    }
    tile.count = static_cast<int>(stop - tile.index);
    const Job<S, T, STEP, DRAWN> job = {fold, step, tile, buffer};
    bool summed = false;
    if constexpr (SCALED_SUMS && sizeof(T) == 2) summed = !scratch && job.sum_scaled(values, start);
    if (summed) {
    } else if (!scratch) {
      job.in_sequence(total, start);
    } else if (fold.graph) {
      job.by_graph(total, static_cast<T*>(scratch));
    } else {
      job.in_a_tree(total, static_cast<T*>(scratch));
    }
    if constexpr (sizeof(T) == sizeof(C)) {
      store(total, fold.finish, last, tile, fold.layout.out, buffer);
    } else {
      if (!summed) FOR_EACH(k, tile.count) values[k] = total[k];
      store(values, fold.finish, last, tile, fold.layout.out, buffer, summed);
    }
    tile.offset += tile.count * fold.layout.stride;
    tile.place += tile.count;
    tile.index = stop;
  }
}

// Part `part` of `parts` of a layout's tiles, in the order of the rows.
template <class Function>
inline void for_tiles(const Layout& layout, i64 part, i64 parts, Function function) {
  const i64 tiles = (layout.length + TILE - 1) / TILE, all = layout.rows * tiles;
  const i64 last = all * (part + 1) / parts;
  for (i64 number = all * part / parts; number < last; ++number) {
    i64 row = number / tiles;
    const i64 from = (number - row * tiles) * TILE, left = layout.length - from;
    Tile tile;
    tile.count = static_cast<int>(left < TILE ? left : TILE);
    tile.entry = row / layout.rows_of_value;
    tile.index = layout.first + (row - tile.entry * layout.rows_of_value) * layout.length + from;
    tile.place = row * layout.length + from;
    tile.offset = from * layout.stride;
    for (int axis = 0; axis < layout.axes; ++axis) {
      const i64 rest = row / layout.sizes[axis];
      tile.offset += (row - rest * layout.sizes[axis]) * layout.strides[axis];
      row = rest;
    }
    function(tile);
  }
}

// `scratch` has a tile of C for each level of a tree, or for each value of a graph's stack.
template <class S, class C, int STEP, bool DRAWN>
inline void fold_tiles(const Fold& fold, i64 part, i64 parts, void* scratch) {
  const Rounder step(fold.accumulator), last(fold.finish.target);
  for_tiles(fold.layout, part, parts, [&](const Tile& tile) {
    fold_tile<S, C, STEP, DRAWN>(fold, step, last, tile, scratch);
  });
}

struct Round {
  Layout layout;
  Finish finish;
};

template <class S, class C>
inline void round_tiles(const Round& round, i64 part, i64 parts, void*) {
  const Rounder last(round.finish.target);
  for_tiles(round.layout, part, parts, [&](const Tile& tile) {
    C values[TILE];
    u32 buffer[LANES];
    load<S>(values, members_of(round.layout).at(0, tile.offset), round.layout.stride, tile.count);
    store(values, round.finish, last, tile, round.layout.out, buffer);
  });
}

#define KERNEL(arguments, ...)                                                             \
  extern "C" __attribute__((visibility("default"))) void run(                              \
      const arguments* given, i64 part, i64 parts, void* scratch) {                        \
    __VA_ARGS__(*given, part, parts, scratch);                                             \
  }                                                                                        \
  extern "C" __attribute__((visibility("default"))) u64 bytes() { return sizeof(arguments); }
