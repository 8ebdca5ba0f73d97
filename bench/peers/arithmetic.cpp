// The least arithmetic of a sum with a float16 accumulator, for processors without float16
// additions: each member is read, added and rounded (see gpusim/compiled/tiles.h), and the result
// is encoded.
#include "loops.h"

const int ROWS = 8;  // members whose sum stays in registers

struct Sixteen {
  typedef u16 type;
  static constexpr float FACTOR = 0x1p-15f;
  static float read(u16 code) { return float_of_half(code); }
  static u8 nan(u16) { return 0; }  // is that of the float32
  static u16 write(float total) { return half_of_float(total * 0x1p15f); }
};
template <int FRACTION, int BIAS>
struct Eight {
  typedef u8 type;
  static constexpr float FACTOR = FRACTION == 2 ? 0x1p-15f : power_of_two(112 - BIAS);
  static constexpr float CODED = power_of_two(BIAS - 112);
  static float read(u8 code) {
    if (FRACTION == 2) return float_of_half(static_cast<u16>(code << 8));
    const u32 bits = static_cast<u32>(static_cast<signed char>(code)) << (23 - FRACTION);
    return __uint_as_float(bits & (0x80000000u | 0x7fu << (23 - FRACTION)));
  }
  static u8 nan(u8 code) { return FRACTION == 3 && (code | 0x80) == 0xff ? 0x80 : 0; }
  static u8 write(float total) {
    const int dropped = 23 - FRACTION;
    const u32 bits = __float_as_uint(total * CODED), odd = bits >> dropped & 1;
    const u32 whole = (bits + ((1u << dropped) / 2 - 1) + odd) >> dropped;
    return static_cast<u8>((whole & 0x7f) | (whole >> (24 - dropped) & 0x80));
  }
};

template <class S, bool FIRST, bool LAST>
inline u32 add(const typename S::type* rows, i64 stride, float* total, typename S::type* out) {
  u32 bits = 0;
  u8 nan = 0;
  FOR_EACH(k, TILE) {
    float sum = FIRST ? S::read(rows[k]) * S::FACTOR : total[k];
    if (FIRST) nan |= S::nan(rows[k]);
#pragma unroll
    for (int n = FIRST; n < ROWS; ++n) {
      nan |= S::nan(rows[n * stride + k]);
      sum = __builtin_fmaf(S::read(rows[n * stride + k]), S::FACTOR, sum);
      sum = __builtin_fmaf(sum, 8192, -__builtin_fmaf(sum, 8192, -sum));
      bits |= __float_as_uint(sum);  // says whether a sum left float16's range
    }
    if (LAST) {
      out[k] = S::write(sum);
    } else {
      total[k] = sum;
    }
  }
  return bits | (nan ? 0x40000000 : 0);
}

// Tiles of members that are `stride` elements apart; each tile begins `step` elements after the one
// before: TILE for the sum, 0 for its time without memory. `bits` are of all totals; bit 30 is set
// also for NaN.
template <class S>
inline void tiles(const void* from, void* to, i64 members, i64 stride, i64 count, i64 step,
                  u32* bits) {
  float total[TILE];
  u32 all = 0;
  for (i64 tile = 0; tile < count; ++tile) {
    const auto* rows = static_cast<const typename S::type*>(from) + tile * step;
    auto* const out = static_cast<typename S::type*>(to) + tile * step;
    if (members == ROWS) {
      all |= add<S, true, true>(rows, stride, total, out);
      continue;
    }
    all |= add<S, true, false>(rows, stride, total, out);
    for (i64 member = ROWS; member < members - ROWS; member += ROWS) {
      all |= add<S, false, false>(rows + member * stride, stride, total, out);
    }
    all |= add<S, false, true>(rows + (members - ROWS) * stride, stride, total, out);
  }
  *bits = all;
}

#define LOOP(name, ...)                                                                            \
  extern "C" __attribute__((visibility("default"))) void name##_tiles(                             \
      const void* from, void* to, i64 members, i64 stride, i64 count, i64 step, u32* bits) {       \
    tiles<__VA_ARGS__>(from, to, members, stride, count, step, bits);                              \
  }
LOOP(float16, Sixteen)
LOOP(float8_e5m2, Eight<2, 15>)
LOOP(float8_e4m3fn, Eight<3, 7>)
