// Kernels of studies: random words, standard normal numbers, and exact sums.
#pragma once

#include "tiles.h"

// `count` words of Philox from word `first` of the blocks of counters (., c1, c2, 0) on.
inline void draw_words(u64* out, i64 first, i64 count, u64 seed, u64 stream, u64 c1, u64 c2) {
  u64 words[32];  // NumPy adds one to the counter before it computes a block
  i64 block = first / 4, skipped = first - 4 * block;
  for (i64 done = 0; done < count; block += 8, skipped = 0) {
    philox_eight(reinterpret_cast<u32*>(words), seed, static_cast<u64>(block) + 1, c1, c2, 0, stream);
    const i64 here = count - done < 32 - skipped ? count - done : 32 - skipped;
    __builtin_memcpy(out + done, words + skipped, static_cast<u64>(here) * 8);
    done += here;
  }
}

// fallback/quantile.py, operation by operation: each is rounded once, so the bits are its own.
struct Ratio {
  double above[8], below[8];
};
struct Quantile {
  double centre, centre_squared, tail, far_tail;
  Ratio central, near, far;
  double atanh[11], log2_high, log2_low, root_of_two;
};

template <int COUNT>
inline double polynomial(const double (&coefficients)[COUNT], double x) {
  double total = x * coefficients[0];
#pragma unroll
  for (int k = 1; k + 1 < COUNT; ++k) total = (total + coefficients[k]) * x;
  return total + coefficients[COUNT - 1];
}

inline double ratio_of(const Ratio& ratio, double x) {
  return polynomial(ratio.above, x) / polynomial(ratio.below, x);
}

inline double natural_log(const Quantile& given, double x) {
  const u64 bits = bits_as<u64>(x);
  double exponent = static_cast<double>(static_cast<i64>(bits >> 52)) - 1023.0;
  double mantissa = bits_as<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  const bool large = mantissa > given.root_of_two;
  exponent = exponent + (large ? 1.0 : 0.0);
  mantissa = mantissa * (large ? 0.5 : 1.0);
  const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
  double series = polynomial(given.atanh, square) * square * s;
  series = series + exponent * given.log2_low;
  series = series + (s + s);
  return series + exponent * given.log2_high;
}

inline void normal_tile(double* out, const u64* words, int count, const Quantile& given) {
  double tails[TILE];
  int places[TILE], found = 0;
  FOR_EACH(k, count) {
    const i64 value = static_cast<i64>(words[k]), magnitude = value ^ (value >> 63);
    const double q = (static_cast<double>(magnitude) + 0.5) * 0x1p-64;
    const double r = given.centre_squared - q * q;
    out[k] = ratio_of(given.central, r) * q;
  }
  for (int k = 0; k < count; ++k) {
    const i64 value = static_cast<i64>(words[k]), magnitude = value ^ (value >> 63);
    const double q = (static_cast<double>(magnitude) + 0.5) * 0x1p-64;
    places[found] = k;
    tails[found] = (static_cast<double>(0x7fffffffffffffffll - magnitude) + 0.5) * 0x1p-64;
    found += q > given.centre;
  }
  FOR_EACH(k, found) {
    const double r = __builtin_elementwise_sqrt(-natural_log(given, tails[k]));
    tails[k] = r > given.far_tail ? -r : ratio_of(given.near, r - given.tail);
  }
  for (int k = 0; k < found; ++k) {
    double value = tails[k];
    if (value < 0) value = ratio_of(given.far, -value - given.far_tail);
    out[places[k]] = value;
  }
  FOR_EACH(k, count) {
    out[k] = bits_as<double>(bits_as<u64>(out[k]) | (words[k] & 0x8000000000000000ull));
  }
}

// The exact sum of rows, column by column, as several doubles: gpusim/tools/study/reference.py.
const int COLUMNS = 256;

struct ExactRows {
  u64 rows;
  i64 count, width;
  i64 row_stride;  // in bytes
  i64 source;      // 0: float64, 1: float32, 2: float16, 3: bfloat16
  u64 levels;      // (capacity, width), zeros
  i64 capacity;
  u64 special;     // the sums of infinities and NaNs
};

template <class S>
inline void add_columns(const ExactRows& given, i64 first, int count) {
  double carry[COLUMNS];
  double* const levels = reinterpret_cast<double*>(given.levels) + first;
  double* const special = reinterpret_cast<double*>(given.special) + first;
  for (i64 row = 0; row < given.count; ++row) {
    const char* at = reinterpret_cast<const char*>(given.rows) + row * given.row_stride;
    load<S>(carry, at + first * S::BYTES, S::BYTES, count);
    u64 infinite = 0;
    FOR_EACH(k, count) infinite |= !(carry[k] - carry[k] == 0);
    if (infinite) {
      for (int k = 0; k < count; ++k) {
        if (carry[k] - carry[k] == 0) continue;
        special[k] = special[k] + carry[k];
        carry[k] = 0;
      }
    }
    u64 rest = 1;
    for (i64 level = 0; rest && level < given.capacity; ++level) {
      double* const sums = levels + level * given.width;
      rest = 0;
      FOR_EACH(k, count) {  // Knuth's error-free addition
        const double a = sums[k], b = carry[k], total = a + b, virtual_ = total - a;
        const double error = (a - (total - virtual_)) + (b - virtual_);
        sums[k] = total;
        carry[k] = error;
        rest |= bits_as<u64>(error) << 1;
      }
    }
    if (!rest) continue;  // else bits are lost, or a sum left the range: not a number
    double* const last = levels + (given.capacity - 1) * given.width;
    FOR_EACH(k, count) last[k] = carry[k] == 0 ? last[k] : bits_as<double>(0x7ff8000000000000ull);
  }
}

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void draw_rows(u64* out, const i64* replicas, i64 rows, i64 first, i64 count, u64 seed,
                        u64 tag, u64 stream) {
  for (i64 row = 0; row < rows; ++row) {
    draw_words(out + row * count, first, count, seed, tag, static_cast<u64>(replicas[row]), stream);
  }
}
EXPORTED void normal_quantile(double* out, const u64* words, i64 count, const Quantile* given) {
  for (i64 first = 0; first < count; first += TILE) {
    const i64 left = count - first;
    normal_tile(out + first, words + first, static_cast<int>(left < TILE ? left : TILE), *given);
  }
}
EXPORTED void add_exactly(const ExactRows* given, i64 first, i64 count) {
  for (i64 at = first; at < first + count; at += COLUMNS) {
    const i64 left = first + count - at;
    const int here = static_cast<int>(left < COLUMNS ? left : COLUMNS);
    switch (given->source) {
      case 0: add_columns<float64>(*given, at, here); break;
      case 1: add_columns<float32>(*given, at, here); break;
      case 2: add_columns<float16>(*given, at, here); break;
      case 3: add_columns<bfloat16>(*given, at, here); break;
    }
  }
}
EXPORTED u64 bytes() { return sizeof(Quantile) + sizeof(ExactRows); }
