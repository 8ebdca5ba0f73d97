// The parts of CUDA that C++ lacks, so that g++ compiles the .cu sources: indices, conversions, and
// a grid that is a loop. No kernel here has a barrier, so that threads can run one by one.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#ifndef __global__
#define __global__ static
#endif
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Index {
  unsigned int x, y, z;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};

// A wide access faults on a GPU where it is not aligned, and has to be seen here too.
static unsigned long long misaligned = 0, wide_loads = 0;

template <class T>
inline T __ldg(const T* at) {
  if (reinterpret_cast<uintptr_t>(at) % alignof(T)) ++misaligned;
  if (sizeof(T) == 16) ++wide_loads;
  T value;
  memcpy(&value, at, sizeof(T));
  return value;
}

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "one width");
  To to;
  memcpy(&to, &from, sizeof(To));
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
inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
  unsigned long long old = *at;
  if (value < old) *at = value;
  return old;
}

// float16 by its definition, in double arithmetic: independent of the kernels' own conversions.
inline float float_of_half(unsigned short bits) {
  int field = bits >> 10 & 31, fraction = bits & 1023;
  double magnitude = field ? ldexp(1024 + fraction, field - 25) : ldexp(fraction, -24);
  if (field == 31) magnitude = fraction ? NAN : INFINITY;
  return static_cast<float>(bits >> 15 ? -magnitude : magnitude);
}
inline unsigned short half_of_float(float value) {
  unsigned short sign = signbit(value) ? 0x8000 : 0;
  if (value != value) return 0x7e00;
  double magnitude = fabs(static_cast<double>(value));
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent = magnitude < 0x1p-14 ? -14 : ilogb(magnitude);
  // nearbyint: to nearest, ties to even; 1024 units carry into the exponent.
  int units = static_cast<int>(nearbyint(ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<unsigned short>(((exponent + 14) << 10) + units);
}

// Each thread has its own columns of a block's shared memory here, as the sources promise.
static std::vector<uint4> shared_memory;
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(shared_memory.data())

template <class Arguments>
inline void run_grid(void (*kernel)(Arguments), unsigned int grid, unsigned int block,
                     unsigned long long shared, const void* arguments) {
  Arguments given;
  memcpy(static_cast<void*>(&given), arguments, sizeof given);
  shared_memory.assign(shared / 16 + 1, uint4{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff});
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  for (blockIdx = {0, 0, 0}; blockIdx.x < grid; ++blockIdx.x) {
    for (threadIdx = {0, 0, 0}; threadIdx.x < block; ++threadIdx.x) kernel(given);
  }
}

#define KERNEL(number, arguments, ...)                                                     \
  extern "C" void kernel_##number(unsigned int grid, unsigned int block,                   \
                                  unsigned long long shared, const void* given) {         \
    run_grid<arguments>(__VA_ARGS__, grid, block, shared, given);                          \
  }                                                                                        \
  extern "C" unsigned long long bytes_##number() { return sizeof(arguments); }
extern "C" unsigned long long count_misaligned() { return misaligned; }
extern "C" unsigned long long count_wide_loads() { return wide_loads; }
