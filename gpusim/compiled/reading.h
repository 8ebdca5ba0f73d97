// Members' elements: codes as they lie in memory, and their values.
#pragma once

#include "loops.h"

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
