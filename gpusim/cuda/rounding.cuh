// One correct rounding of a float32 or float64 to a smaller format, nearest or stochastic.
// Integer arithmetic on the bits: exact, the same on every machine, and without a division.
#pragma once

#include "formats.cuh"

// A format to round to, as fallback/formats.py's FormatInfo describes it, and the codes that store it.
// All members have 8 bytes, so that the host lays it out as the device does.
struct Target {
  i64 fraction_bits, min_exponent;
  double smallest, largest, lowest;
  i64 has_infinity, has_negative_zero;
  i64 bytes, nan_code, infinity_code;  // of the dtypes of 8 and 16 bits only
};

template <class C>
struct Bits;
template <>
struct Bits<float> {
  typedef u32 Word;
  static constexpr int FRACTION = 23, BIAS = 127;
  __device__ static __forceinline__ u32 of(float value) { return __float_as_uint(value); }
  __device__ static __forceinline__ float value(u32 bits) { return __uint_as_float(bits); }
  __device__ static __forceinline__ int leading_zeros(u32 bits) { return __clz(bits); }
};
template <>
struct Bits<double> {
  typedef u64 Word;
  static constexpr int FRACTION = 52, BIAS = 1023;
  __device__ static __forceinline__ u64 of(double value) {
    return static_cast<u64>(__double_as_longlong(value));
  }
  __device__ static __forceinline__ double value(u64 bits) {
    return __longlong_as_double(static_cast<i64>(bits));
  }
  __device__ static __forceinline__ int leading_zeros(u64 bits) {
    return __clzll(static_cast<i64>(bits));
  }
};

// floor(rest / 2**dropped * 2**32), where 0 < dropped and rest < 2**dropped.
template <class Word>
__device__ __forceinline__ u32 share_of(Word rest, int dropped) {
  if (dropped <= 32) return static_cast<u32>(rest << (32 - dropped));
  int down = dropped - 32;
  return down < 8 * static_cast<int>(sizeof(Word)) ? static_cast<u32>(rest >> down) : 0;
}

// To a format with fewer fraction bits: the significand without its last `dropped` bits, or one
// more. `odd` says whether the lower neighbour's code is odd.
template <class Word>
__device__ __forceinline__ bool goes_up(Word rest, int dropped, bool odd, bool drawn, u32 lane) {
  if (dropped <= 0) return false;
  if (drawn) return lane < share_of(rest, dropped);
  if (dropped > 8 * static_cast<int>(sizeof(Word)) - 1) return false;
  Word half = static_cast<Word>(1) << (dropped - 1);
  return rest > half || (rest == half && odd);
}

// 2**exponent, also where it is a subnormal number of C.
template <class C>
__device__ __forceinline__ C power(int exponent) {
  typedef Bits<C> B;
  typedef typename B::Word Word;
  int field = exponent + B::BIAS;
  if (field > 0) return B::value(static_cast<Word>(field) << B::FRACTION);
  return B::value(static_cast<Word>(1) << (B::FRACTION - 1 + field));
}

// To any format. `drawn`: stochastically, by `lane`.
template <class C>
__device__ __forceinline__ C round_to_target(C value, const Target& target, bool drawn, u32 lane) {
  typedef Bits<C> B;
  typedef typename B::Word Word;
  const Word top = static_cast<Word>(1) << (8 * sizeof(Word) - 1);
  const int fraction = static_cast<int>(target.fraction_bits);
  const int least = static_cast<int>(target.min_exponent);
  Word bits = B::of(value), sign = bits & top;
  Word magnitude = bits & (top - 1);
  C result;
  if (value != value) return value;
  if ((magnitude >> B::FRACTION) == 2 * B::BIAS + 1) {
    result = B::value(magnitude);  // an infinity
  } else if (magnitude == 0) {
    result = 0;
  } else {
    int exponent = static_cast<int>(magnitude >> B::FRACTION) - B::BIAS;
    const Word hidden = static_cast<Word>(1) << B::FRACTION;
    Word significand = (magnitude & (hidden - 1)) | hidden;
    if (exponent == -B::BIAS) {  // a subnormal number of C, made a normal one
      int shift = B::leading_zeros(magnitude) - (8 * static_cast<int>(sizeof(Word)) - 1 - B::FRACTION);
      significand = magnitude << shift;
      exponent = 1 - B::BIAS - shift;
    }
    int binade = exponent > least ? exponent : least;
    int dropped = B::FRACTION - fraction + (binade - exponent);
    Word kept = dropped > B::FRACTION ? 0 : significand >> dropped;
    Word rest = dropped > B::FRACTION ? significand : significand - (kept << dropped);
    // Without a fraction the codes count the exponents.
    bool odd = fraction ? kept & 1 : kept && ((binade - least + 1) & 1);
    bool up = goes_up(rest, dropped, odd, drawn, lane);
    C smallest = static_cast<C>(target.smallest);
    if (B::value(magnitude) < smallest && smallest > power<C>(least - fraction)) {
      // No subnormal numbers: the neighbours are zero, of even code, and `smallest`.
      if (drawn) {
        double scaled = static_cast<double>(B::value(magnitude)) * 4294967296.0;
        double rest_of = fmod(scaled, target.smallest);
        double quotient = rint((scaled - rest_of) / target.smallest);
        up = static_cast<double>(lane) < quotient;
      } else {
        up = B::value(magnitude) > smallest / 2;
      }
      result = up ? smallest : 0;
    } else {
      result = static_cast<C>(kept + (up ? 1 : 0)) * power<C>(binade - fraction);
    }
  }
  result = B::value(B::of(result) | sign);
  if (result == 0 && !target.has_negative_zero) result = 0;
  const C infinity = B::value(static_cast<Word>(2 * B::BIAS + 1) << B::FRACTION);
  const C nan = B::value(static_cast<Word>(4 * B::BIAS + 3) << (B::FRACTION - 1));
  if (result > static_cast<C>(target.largest)) return target.has_infinity ? infinity : nan;
  if (result < static_cast<C>(target.lowest)) {
    return target.has_infinity && target.lowest != 0 ? -infinity : nan;
  }
  return result;
}

// A float32 without its last DROPPED bits, or the next one away from zero: that one if the lane is
// less than the share of what is dropped, for which DROPPED bits of ~lane carry. Not for NaN.
template <int DROPPED>
__device__ __forceinline__ u32 draw_bits(u32 bits, u32 lane) {
  return (bits + (~lane >> (32 - DROPPED))) & (~0u << DROPPED);
}

// Stochastically from float32 to float16.
__device__ __forceinline__ float draw_float16(float value, u32 lane) {
  u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return value;
  if (magnitude >= 0x38800000u) {  // a normal number of float16
    magnitude = draw_bits<13>(magnitude, lane);
    if (magnitude > 0x477fe000u) magnitude = 0x7f800000u;
  } else {  // a multiple of 2**-24, or none
    int field = static_cast<int>(magnitude >> 23);
    u32 significand = field ? (magnitude & 0x007fffffu) | 0x00800000u : magnitude;
    int dropped = 126 - (field ? field : 1);
    u32 kept = dropped > 23 ? 0 : significand >> dropped;
    u32 rest = dropped > 23 ? significand : significand - (kept << dropped);
    kept += lane < share_of(rest, dropped);
    constexpr float unit = power_of_two(-24);
    magnitude = __float_as_uint(static_cast<float>(kept) * unit);
  }
  return __uint_as_float(magnitude | (bits & 0x80000000u));
}

// bfloat16 is float32's upper half: a carry out of the lower half goes up, to infinity too.
#ifndef HAS_BFLOATS_OF_FLOATS
__device__ __forceinline__ u32 bfloat_of_float(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

__device__ __forceinline__ u32 bfloats_of_floats(float low, float high) {
  return bfloat_of_float(low) | bfloat_of_float(high) << 16;
}
#endif

__device__ __forceinline__ float round_bfloat16(float value) {
  return __uint_as_float(bfloats_of_floats(0, value));
}

__device__ __forceinline__ float draw_bfloat16(float value, u32 lane) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(draw_bits<16>(bits, lane));
}

// The code of a float32 that the format of 8 or 16 bits holds exactly.
__device__ __forceinline__ u32 code_of(float value, const Target& target) {
  u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<u32>(target.nan_code);
  int width = 8 * static_cast<int>(target.bytes);
  u32 sign = bits >> 31 << (width - 1);
  if (magnitude == 0x7f800000u) return sign | static_cast<u32>(target.infinity_code);
  int fraction = static_cast<int>(target.fraction_bits);
  int normal = static_cast<int>(target.min_exponent) + 127;  // the field of the least normal number
  int field = static_cast<int>(magnitude >> 23);
  if (field >= normal) {
    return sign | ((magnitude >> (23 - fraction)) - (static_cast<u32>(normal - 1) << fraction));
  }
  u32 significand = field ? (magnitude & 0x007fffffu) | 0x00800000u : magnitude;
  int shift = 23 - fraction + normal - (field ? field : 1);
  return sign | (shift > 23 ? 0u : significand >> shift);
}
