// Rounding of values to a format, a tile at a time.
#pragma once

#include "loops.h"

// Formats whose rounding takes no branch: signed, with subnormal numbers, and with the distance of
// these and its inverse among float32's normal numbers. The others are rounded one by one.
struct Vector {
  int dropped;  // bits that go from a normal number's significand
  u32 normal;   // the bits of the least normal number
  float ulp, inverse;  // of subnormal numbers
  float largest, beyond;
  float zero;  // what is added to take the sign from zeros, or to leave it
  u32 limit;   // the bits of the power of two above `largest`
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
          target.has_negative_zero ? -0.0f : 0.0f,
          (__float_as_uint(static_cast<float>(target.largest)) & 0x7f800000u) + 0x00800000u};
}

// A target, and how it is rounded to.
struct Rounder {
  const Target& target;
  const bool by_vector, single, half;
  const Vector vector;
  const bool narrow;  // whether `round_narrow` has the exponents that it needs

  explicit Rounder(const Target& given)
      : target(given),
        by_vector(is_vector(given)),
        single(given.fraction_bits == 23 && given.min_exponent == -126 && given.has_infinity &&
               given.lowest == -given.largest && given.smallest < 0x1p-148),
        half(by_vector && given.fraction_bits == 10 && given.min_exponent == -14 &&
             given.largest == 65504 && given.has_infinity && given.has_negative_zero),
        vector(by_vector ? vector_of(given) : Vector{}),
        narrow(by_vector && (vector.limit >> 23) + vector.dropped < 255) {}

  // Whether ToFormat<TARGET, DRAWN> rounds.
  template <bool DRAWN>
  bool in_loops() const {
    return DRAWN ? by_vector : narrow;
  }
};

// To nearest: the sum with a power of two whose distance to the next number is the format's here.
inline float round_narrow(float value, const Vector& target) {
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const u32 bounded = magnitude < target.limit ? magnitude : target.limit;
  const u32 binade = bounded & 0x7f800000u, least = target.normal ? target.normal : 0x00800000u;
  const u32 exponent = (binade > least ? binade : least) + (target.dropped << 23);
  const float power = __uint_as_float(exponent);
  float result = (__uint_as_float(bounded) + power) - power;
  result = result > target.largest ? target.beyond : result;
  result = __uint_as_float(__float_as_uint(result) | (bits & 0x80000000u)) + target.zero;
  return magnitude > 0x7f800000u ? value : result;
}

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
  result = __uint_as_float(__float_as_uint(result) | (bits & 0x80000000u)) + target.zero;
  return magnitude > 0x7f800000u ? value : result;
}

// As draw_float16, without branches.
inline float draw_half(float value, u32 lane) {
  const Vector half = {13, 0x38800000u, 0x1p-24f, 0x1p24f, 65504.0f, __builtin_inff(), -0.0f, 0};
  return round_vector<true>(value, half, lane);
}

template <class C, bool DRAWN>
inline void round_all(C* values, int count, const Rounder& rounding, const u32* lanes) {
  if (sizeof(C) == 4 && !DRAWN && rounding.half) {
    FOR_EACH(k, count) values[k] = float_of_half(half_of_float(static_cast<float>(values[k])));
  } else if (sizeof(C) == 4 && !DRAWN && rounding.narrow) {
    const Vector vector = rounding.vector;
    FOR_EACH(k, count) values[k] = round_narrow(static_cast<float>(values[k]), vector);
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

// The rounding of a loop's element to a FORMAT, which is a Step; TARGET is one that rounds in_loops.
template <int FORMAT, bool DRAWN>
struct ToFormat {
  Vector vector;

  template <class C>
  inline C operator()(C value, u32 lane) const {
    if constexpr (FORMAT == TARGET && DRAWN) {
      return round_vector<true>(static_cast<float>(value), vector, lane);
    } else if constexpr (FORMAT == TARGET) {
      return round_narrow(static_cast<float>(value), vector);
    } else {
      return rounded<FORMAT, DRAWN>(value, lane);
    }
  }
};
