// CUDA's vectors, and its functions on bits, in C++. The tests' build of the GPU's kernels has them too.
#pragma once

struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "one width");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
inline float __uint_as_float(unsigned int bits) { return bits_as<float>(bits); }
inline unsigned int __float_as_uint(float value) { return bits_as<unsigned int>(value); }
inline double __longlong_as_double(long long bits) { return bits_as<double>(bits); }
inline long long __double_as_longlong(double value) { return bits_as<long long>(value); }
inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __clzll(long long bits) { return bits ? __builtin_clzll(bits) : 64; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
  unsigned long long bytes = low | static_cast<unsigned long long>(high) << 32;
  unsigned int result = 0;
  for (int index = 0; index < 4; ++index) {
    result |= static_cast<unsigned int>(bytes >> (8 * (selector >> (4 * index) & 7)) & 255)
              << (8 * index);
  }
  return result;
}
