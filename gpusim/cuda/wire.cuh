// The scale of a block of values that are sent: docs/numerics.md, "On the wire".
#pragma once

#include "finish.cuh"

enum Rule { UNSCALED, AMAX, FLOOR, CEIL, EVEN };

template <class C>
__device__ __forceinline__ typename Bits<C>::Word magnitude_of(C value) {
  return Bits<C>::of(value) & ~(static_cast<typename Bits<C>::Word>(1) << (8 * sizeof(C) - 1));
}

// The scale of a block with this largest magnitude; NaN where it arrives as NaN. A wire has a rule, a
// target and its max_exponent.
template <class W, class Wire>
__device__ __forceinline__ W scale_of(W amax, const Wire& wire) {
  typedef Bits<W> B;
  typedef typename B::Word Word;
  const Word hidden = static_cast<Word>(1) << B::FRACTION;
  if (amax == 0) return 1;
  const W nan = B::value(static_cast<Word>(4 * B::BIAS + 3) << (B::FRACTION - 1));
  if (!(amax - amax == 0)) return nan;
  if (wire.rule == AMAX) {
    const float quotient = static_cast<float>(amax / static_cast<W>(wire.target.largest));
    if (!(quotient - quotient == 0)) return nan;
    const float least = power<float>(-149);
    return quotient < least ? least : quotient;
  }
  const Word bits = B::of(amax);
  int exponent = static_cast<int>(bits >> B::FRACTION) - B::BIAS;
  Word significand = (bits & (hidden - 1)) | hidden;
  if (exponent == -B::BIAS) {  // a subnormal number, made a normal one
    const int shift = B::leading_zeros(bits) - (8 * static_cast<int>(sizeof(Word)) - 1 - B::FRACTION);
    significand = bits << shift;
    exponent = 1 - B::BIAS - shift;
  }
  if (wire.rule == CEIL) exponent += significand != hidden;
  const int dropped = B::FRACTION - static_cast<int>(wire.target.fraction_bits);
  if (wire.rule == EVEN && dropped > 0) {
    exponent += significand >= 2 * hidden - (static_cast<Word>(1) << (dropped - 1));
  }
  exponent -= static_cast<int>(wire.max_exponent);
  exponent = exponent < -127 ? -127 : exponent > 127 ? 127 : exponent;
  return power<W>(exponent);
}
