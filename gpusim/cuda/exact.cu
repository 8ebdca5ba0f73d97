// exact: the sum of all members as if added without any rounding, rounded once; fallback/exact.py has
// the method. Each thread has an element, and adds in double with the errors of its additions; where
// that is not enough, it adds again in integers, which lie in local memory.
#include "finish.cuh"

// All members have 8 bytes, so that the host lays it out as the device does.
struct Exact {
  Layout layout;
  Finish finish;
  Target accumulator;
  i64 rounding;  // of the sum: UNROUNDED (the accumulator is float64), TO_FLOAT32 or TO_TARGET
  i64 drawn;     // whether it is stochastic
};

// left + right, and what the sum lacks (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B).
__device__ __forceinline__ double two_sum(double left, double right, double& error) {
  const double total = left + right, part = total - left;
  error = (left - (total - part)) + (right - part);
  return total;
}

__device__ __forceinline__ bool is_finite(double value) { return value - value == 0; }

// Digits of 32 bits from 2**-1074 on: those of all exponents, two that a significand reaches into,
// and two for the carries; below them two of zeros, so that three digits always follow.
struct Digits {
  static constexpr int BELOW = 2, COUNT = BELOW + (2045 / 32 + 3) + 2;
  static constexpr i64 MASK = 0xffffffffll;
  i64 digits[COUNT];
  double special;  // the sum of what is not finite

  __device__ void clear() {
#pragma unroll 1
    for (int place = 0; place < COUNT; ++place) digits[place] = 0;
    special = 0;
  }

  __device__ void add(double value) {
    if (!is_finite(value)) {
      special += value;
      return;
    }
    const i64 bits = __double_as_longlong(value), exponent = bits >> 52 & 0x7ff;
    const i64 significand = (bits & ((1ll << 52) - 1)) | (exponent ? 1ll << 52 : 0);
    const int position = exponent ? static_cast<int>(exponent) - 1 : 0, shift = position & 31;
    const i64 low = (significand & MASK) << shift, high = (significand >> 32) << shift;
    const i64 sign = bits < 0 ? -1 : 1;
    i64* at = digits + position / 32 + BELOW;
    at[0] += sign * (low & MASK);
    at[1] += sign * ((low >> 32 & MASK) + (high & MASK));
    at[2] += sign * (high >> 32);
  }

  // What is beyond 32 bits moves up; the last digit has the sign.
  __device__ void carry() {
#pragma unroll 1
    for (int place = 0; place + 1 < COUNT; ++place) {
      digits[place + 1] += digits[place] >> 32;
      digits[place] &= MASK;
    }
  }

  // The sum in double, rounded to odd, or to nearest.
  __device__ double value(bool odd) {
    if (special != 0) return special;
    carry();
    const bool negative = digits[COUNT - 1] < 0;
    if (negative) {
#pragma unroll 1
      for (int place = 0; place < COUNT; ++place) digits[place] = -digits[place];
      carry();
    }
    int top = COUNT - 1;
    while (top > BELOW && !digits[top]) --top;
    bool more = false;
#pragma unroll 1
    for (int place = 0; place < top - 2; ++place) more = more || digits[place];
    // The 64 bits from the leading one on, of which a double has 53.
    const u64 first = digits[top], second = digits[top - 1], third = digits[top - 2];
    const int length = 64 - __clzll(static_cast<i64>(first));
    const u64 word = (first << (63 - length) << 1) | second << (32 - length) | third >> length;
    more = more || (third & ((1ull << length) - 1));
    const u64 dropped = word & 0x7ff;
    u64 kept = word >> 11;
    if (odd) {
      kept |= dropped || more;
    } else {
      kept += dropped > 0x400 || (dropped == 0x400 && (more || (kept & 1)));
    }
    const double found = scaled(kept, length + 32 * (top - 2 - BELOW) - 1074 + 11);
    return negative ? -found : found;
  }

  // kept * 2**exponent: kept has at most 53 bits, and those below 2**-1074 are zero.
  __device__ static double scaled(u64 kept, int exponent) {
    if (!kept) return 0;
    if (kept >> 53) {  // 2**53
      kept >>= 1;
      ++exponent;
    }
    const int unused = __clzll(static_cast<i64>(kept)) - 11;
    kept <<= unused;
    const int field = exponent - unused + 1075;  // biased, if normal
    if (field >= 2047) return Bits<double>::value(2047ull << 52);
    if (field < 1) return Bits<double>::value(kept >> (1 - field));
    return Bits<double>::value((kept & ((1ull << 52) - 1)) | static_cast<u64>(field) << 52);
  }
};

template <class S>
__device__ __forceinline__ double member_value(const Members& members, int member, i64 offset) {
  return static_cast<double>(value_of(S(), load_element<S::BYTES>(members.at(member, offset))));
}

template <class S>
__device__ double by_digits(const Members& members, int count, i64 offset, bool odd) {
  Digits digits;
  digits.clear();
#pragma unroll 1
  for (int member = 0; member < count; ++member) {
    digits.add(member_value<S>(members, member, offset));
  }
  return digits.value(odd);
}

// Rounded to odd, an inexact sum is the neighbour in double whose last bit is 1: a later rounding to
// 51 bits or fewer gives the bits that the exact sum would.
template <class S>
__device__ __forceinline__ double exact_sum(const Members& members, int count, i64 offset, bool odd) {
  double high = member_value<S>(members, 0, offset), low = 0, error, lost;
  bool doubtful = false;
#pragma unroll 4
  for (int member = 1; member < count; ++member) {
    high = two_sum(high, member_value<S>(members, member, offset), error);
    low = two_sum(low, error, lost);
    doubtful = doubtful || !(lost == 0);
  }
  if (low != 0) {  // else -0 stays
    high = two_sum(high, low, error);
    doubtful = doubtful || !is_finite(error);
    u64 bits = Bits<double>::of(high);
    if (odd && error != 0 && !(bits & 1)) {
      bits += (error > 0) == (high > 0) ? 1 : ~0ull;
      high = Bits<double>::value(bits);
    }
  }
  if (doubtful || !is_finite(high)) return by_digits<S>(members, count, offset, odd);
  return high;
}

template <class S, class C>
__global__ void __launch_bounds__(256, 1) exact(const Exact exact) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  Chunk chunk = chunk_of<1>(exact.layout, thread);
  if (chunk.from >= chunk.to) return;
  const int count = static_cast<int>(exact.layout.members);
  double sum = exact_sum<S>(members_of(exact.layout), count, chunk.offset, exact.rounding != UNROUNDED);
  if (exact.rounding == TO_FLOAT32) sum = static_cast<float>(sum);
  if (exact.rounding == TO_TARGET) {
    u32 lane = 0;
    if (exact.drawn) {
      lane = draw_of(exact.finish, chunk).at(1).lane(static_cast<int>(chunk.index) & 7);
    }
    sum = round_to_target(sum, exact.accumulator, exact.drawn, lane);
  }
  C total[1] = {static_cast<C>(sum)};
  finish_chunk(total, exact.finish, chunk, exact.layout.out, chunk.from, chunk.to);
}
