// The end of a fold: the rounding of its result, the codes, and the store.
#pragma once

#include "draws.h"
#include "rounders.h"

// The codes of an 8-bit format, to which values are rounded to nearest as by `round_vector`.
template <class C>
inline void encode(const C* values, char* at, const Target& target, const Vector& vector,
                   int count) {
  const u32 least = vector.normal - 0x00800000u, dropped = vector.dropped;
  const u32 largest = (__float_as_uint(vector.largest) - least) >> dropped;
  const u32 nan = static_cast<u32>(target.nan_code);
  const u32 infinity = static_cast<u32>(target.infinity_code);
  const u32 half = (1u << dropped) / 2 - 1, zero_sign = target.has_negative_zero ? 0x80 : 0;
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

// The end of a fold: division, and the one rounding to the output's format. `encoded`: what the
// codes' rounding to nearest does is left to it.
template <class C>
inline void settle(C* values, const Finish& finish, const Rounder& rounder, const Tile& tile,
                   u32* buffer, bool encoded) {
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
    } else if (!encoded) {
      FOR_EACH(k, count) values[k] = rounded<FLOAT16, false>(values[k], 0);
    }
  } else if (finish.rounding == TO_BFLOAT16) {
    if (drawn) {
      FOR_EACH(k, count) values[k] = rounded<BFLOAT16, true>(values[k], lanes[k]);
    } else {
      FOR_EACH(k, count) values[k] = rounded<BFLOAT16, false>(values[k], 0);
    }
  }
  encoded &= finish.encoding == AS_FLOAT8 && sizeof(C) == 4 && rounder.by_vector;
  if (finish.rounding == TO_TARGET && (drawn || !encoded)) {
    if (drawn) {
      round_all<C, true>(values, count, rounder, lanes);
    } else {
      round_all<C, false>(values, count, rounder, lanes);
    }
  }
}

// The same, and the store. `halves`: the values are finite, and float16 has them.
template <class C>
inline void store(C* values, const Finish& finish, const Rounder& rounder, const Tile& tile,
                  u64 out, u32* buffer, bool halves = false) {
  const int count = tile.count;
  settle(values, finish, rounder, tile, buffer, true);
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
