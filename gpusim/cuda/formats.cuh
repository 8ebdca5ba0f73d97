// Number formats: how each is stored, and how it is read exactly into the computing type.
// A format is a row: its bytes, fraction bits, bias and what its highest codes stand for.
#pragma once

#include "intrinsics.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// The codes above the finite ones: infinity and NaNs as in IEEE 754; one NaN, the highest code (FN);
// or one NaN in place of -0 (FNUZ).
enum Top { IEEE, FN, FNUZ };

template <int FRACTION_, int BIAS_, Top TOP_>
struct Float8 {
  static constexpr int BYTES = 1, FRACTION = FRACTION_, BIAS = BIAS_;
  static constexpr Top TOP = TOP_;
};
struct float8_e5m2 : Float8<2, 15, IEEE> {};
struct float8_e4m3fn : Float8<3, 7, FN> {};
struct float8_e5m2fnuz : Float8<2, 16, FNUZ> {};
struct float8_e4m3fnuz : Float8<3, 8, FNUZ> {};
struct float16 {
  static constexpr int BYTES = 2;
};
struct bfloat16 {
  static constexpr int BYTES = 2;
};
struct float32 {
  static constexpr int BYTES = 4;
};
struct float64 {
  static constexpr int BYTES = 8;
};
template <int BYTES_, bool SIGNED_>
struct Integer {
  static constexpr int BYTES = BYTES_;
  static constexpr bool SIGNED = SIGNED_;
};
struct int8 : Integer<1, true> {};
struct int16 : Integer<2, true> {};
struct int32 : Integer<4, true> {};
struct int64 : Integer<8, true> {};
struct uint8 : Integer<1, false> {};
struct uint16 : Integer<2, false> {};
struct uint32 : Integer<4, false> {};
struct uint64 : Integer<8, false> {};

// 2^exponent, for exponents of float32's normal numbers.
__device__ constexpr float power_of_two(int exponent) {
  float power = 1;
  for (; exponent > 0; --exponent) power *= 2;
  for (; exponent < 0; ++exponent) power /= 2;
  return power;
}

// From the code's bits. No input or output of its one subtraction is subnormal in float32, so the
// value is right even where subnormal numbers are flushed.
template <int FRACTION, int BIAS, Top TOP>
__device__ __forceinline__ float value_of(Float8<FRACTION, BIAS, TOP>, u32 code) {
  constexpr u32 HIDDEN = 1u << FRACTION, LEAST = static_cast<u32>(128 - BIAS) << 23;
  const u32 magnitude = code & 0x7f;
  u32 bits = (magnitude << (23 - FRACTION)) + LEAST - (1u << 23);
  if (magnitude < HIDDEN) {  // subnormal: the fraction of the least normal number, less that number
    const float fraction = __uint_as_float(bits + (1u << 23)) - __uint_as_float(LEAST);
    bits = __float_as_uint(fraction);
  }
  if (TOP == IEEE && magnitude >= (0x7fu >> FRACTION << FRACTION)) {
    bits = 0x7f800000u | (magnitude << (23 - FRACTION));
  }
  if (TOP == FN && magnitude == 0x7f) bits = 0x7fc00000u;
  if (TOP == FNUZ && code == 0x80) bits = 0x7fc00000u;
  return __uint_as_float(bits | (code & 0x80) << 24);
}

// float8_e5m2 is float16's upper byte.
__device__ __forceinline__ float value_of(float8_e5m2, u32 code) {
  return float_of_half(static_cast<u16>(code << 8));
}

__device__ __forceinline__ float value_of(float16, u32 code) {
  return float_of_half(static_cast<u16>(code));
}

__device__ __forceinline__ float value_of(bfloat16, u32 code) {
  return __uint_as_float(code << 16);
}

__device__ __forceinline__ float value_of(float32, u32 code) { return __uint_as_float(code); }

__device__ __forceinline__ double value_of(float64, u64 code) {
  return __longlong_as_double(static_cast<i64>(code));
}

template <int BYTES, bool SIGNED>
__device__ __forceinline__ u64 value_of(Integer<BYTES, SIGNED>, u64 code) {
  const int unused = 64 - 8 * BYTES;
  return SIGNED ? static_cast<u64>(static_cast<i64>(code << unused) >> unused) : code;
}

// The elements of one thread, as they lie in memory.
template <int BYTES, int COUNT>
struct Raw {
  static constexpr int SIZE = BYTES * COUNT;
  static constexpr int WORDS = (SIZE + 3) / 4;
  u32 words[WORDS];

  __device__ __forceinline__ u64 code(int index) const {
    if constexpr (BYTES == 8) {
      return words[2 * index] | static_cast<u64>(words[2 * index + 1]) << 32;
    } else if constexpr (BYTES == 4) {
      return words[index];
    } else {
      constexpr int each = 4 / BYTES;
      return words[index / each] >> (8 * BYTES * (index % each)) & ((1u << (8 * BYTES)) - 1);
    }
  }

  __device__ __forceinline__ void put(int index, u64 code) {
    if constexpr (BYTES == 8) {
      words[2 * index] = static_cast<u32>(code);
      words[2 * index + 1] = static_cast<u32>(code >> 32);
    } else if constexpr (BYTES == 4) {
      words[index] = static_cast<u32>(code);
    } else {
      constexpr int each = 4 / BYTES;
      words[index / each] |= static_cast<u32>(code) << (8 * BYTES * (index % each));
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int word = 0; word < WORDS; ++word) words[word] = 0;
  }
};

// Whether float16 has all values of S.
template <class S>
constexpr __device__ bool is_in_float16() {
  return S::BYTES == 1;
}
template <>
constexpr __device__ bool is_in_float16<float16>() {
  return true;
}

// Elements index and index + 1 as two float16 in a word, where that takes an instruction at most.
template <class S>
constexpr __device__ bool reads_halves() {
  return false;
}

template <>
constexpr __device__ bool reads_halves<float16>() {
  return true;
}
template <int COUNT>
__device__ __forceinline__ u32 halves_of(float16, const Raw<2, COUNT>& raw, int index) {
  return raw.words[index / 2];
}

template <>
constexpr __device__ bool reads_halves<float8_e5m2>() {
  return true;
}
template <int COUNT>
__device__ __forceinline__ u32 halves_of(float8_e5m2, const Raw<1, COUNT>& raw, int index) {
  return __byte_perm(raw.words[index / 4], 0, index & 2 ? 0x3424 : 0x1404);  // the upper bytes
}

#ifdef HAS_HALVES_OF_E4M3
template <>
constexpr __device__ bool reads_halves<float8_e4m3fn>() {
  return true;
}
template <int COUNT>
__device__ __forceinline__ u32 halves_of(float8_e4m3fn, const Raw<1, COUNT>& raw, int index) {
  return halves_of_e4m3(raw.words[index / 4] >> (8 * (index & 2)));
}
#endif

// The access that moves a chunk of SIZE bytes: 16 bytes at a time where there are as many.
constexpr __device__ int access_width(int size) { return size < 16 ? size : 16; }

template <int BYTES>
__device__ __forceinline__ u64 load_element(const char* at) {
  if constexpr (BYTES == 1) return __ldg(reinterpret_cast<const u8*>(at));
  if constexpr (BYTES == 2) return __ldg(reinterpret_cast<const u16*>(at));
  if constexpr (BYTES == 4) return __ldg(reinterpret_cast<const u32*>(at));
  if constexpr (BYTES == 8) return __ldg(reinterpret_cast<const u64*>(at));
}

template <int BYTES>
__device__ __forceinline__ void store_element(char* at, u64 code) {
  if constexpr (BYTES == 1) *reinterpret_cast<u8*>(at) = static_cast<u8>(code);
  if constexpr (BYTES == 2) *reinterpret_cast<u16*>(at) = static_cast<u16>(code);
  if constexpr (BYTES == 4) *reinterpret_cast<u32*>(at) = static_cast<u32>(code);
  if constexpr (BYTES == 8) *reinterpret_cast<u64*>(at) = code;
}

// Elements from..to-1 of a chunk, `stride` bytes apart; `whole`: all, aligned to the access width.
// A chunk that is not `present` is not loaded.
template <int BYTES, int COUNT>
__device__ __forceinline__ Raw<BYTES, COUNT> load_chunk(const char* at, i64 stride, int from, int to,
                                                        bool whole, bool present = true) {
  Raw<BYTES, COUNT> raw;
  constexpr int SIZE = BYTES * COUNT;
  if (whole) {
    if constexpr (SIZE >= 16) {
#pragma unroll
      for (int part = 0; part < SIZE / 16; ++part) {
        const uint4 four = load_if(at + 16 * part, present);
        raw.words[4 * part] = four.x;
        raw.words[4 * part + 1] = four.y;
        raw.words[4 * part + 2] = four.z;
        raw.words[4 * part + 3] = four.w;
      }
    } else if (!present) {
      raw.clear();
    } else if constexpr (SIZE == 8) {
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(at));
      raw.words[0] = two.x;
      raw.words[1] = two.y;
    } else {
      raw.words[0] = static_cast<u32>(load_element<SIZE>(at));
    }
    return raw;
  }
  raw.clear();
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    if (present && from <= index && index < to) {
      raw.put(index, load_element<BYTES>(at + index * stride));
    }
  }
  return raw;
}

template <int BYTES, int COUNT>
__device__ __forceinline__ void store_chunk(char* at, const Raw<BYTES, COUNT>& raw, int from,
                                            int to) {
  constexpr int SIZE = BYTES * COUNT;
  bool whole = from == 0 && to == COUNT &&
               (reinterpret_cast<u64>(at) & (access_width(SIZE) - 1)) == 0;
  if (whole && SIZE >= 8) {
    if constexpr (SIZE >= 16) {
#pragma unroll
      for (int part = 0; part < SIZE / 16; ++part) {
        uint4 four;
        four.x = raw.words[4 * part];
        four.y = raw.words[4 * part + 1];
        four.z = raw.words[4 * part + 2];
        four.w = raw.words[4 * part + 3];
        reinterpret_cast<uint4*>(at)[part] = four;
      }
    } else if constexpr (SIZE == 8) {
      uint2 two;
      two.x = raw.words[0];
      two.y = raw.words[1];
      *reinterpret_cast<uint2*>(at) = two;
    }
    return;
  }
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    if (from <= index && index < to) store_element<BYTES>(at + index * BYTES, raw.code(index));
  }
}
