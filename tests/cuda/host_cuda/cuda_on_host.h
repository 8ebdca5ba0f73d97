// The parts of CUDA that C++ lacks, so that g++ compiles the .cu sources: indices, conversions, and
// a grid that is a loop. Threads run one by one; where the source has barriers, as fibers.
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#include "../../../gpusim/compiled/cuda_bits.h"

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
#define __shared__ static
#ifdef FAKE_BARRIERS
#include "fibers.h"
#endif

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

inline uint4 load_if(const char* at, bool present) {
  return present ? __ldg(reinterpret_cast<const uint4*>(at)) : uint4{~0u, ~0u, ~0u, ~0u};
}

inline unsigned long long atomicMin(unsigned long long* at, unsigned long long value) {
  unsigned long long old = *at;
  if (value < old) *at = value;
  return old;
}

template <class T>
inline T atomicMax(T* at, T value) {
  T old = *at;
  if (old < value) *at = value;
  return old;
}

// float16 by its definition, in double arithmetic: independent of the kernels' own conversions.
inline float float_of_half(unsigned short bits) {
  int field = bits >> 10 & 31, fraction = bits & 1023;
  double magnitude = field ? ldexp(1024 + fraction, field - 25) : ldexp(fraction, -24);
  if (field == 31) magnitude = fraction ? NAN : INFINITY;
  return static_cast<float>(bits >> 15 ? -magnitude : magnitude);
}
inline unsigned short half_of(double value) {
  unsigned short sign = signbit(value) ? 0x8000 : 0;
  if (value != value) return 0x7e00;
  double magnitude = fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent = magnitude < 0x1p-14 ? -14 : ilogb(magnitude);
  // nearbyint: to nearest, ties to even; 1024 units carry into the exponent.
  int units = static_cast<int>(nearbyint(ldexp(magnitude, 10 - exponent)));
  return sign | static_cast<unsigned short>(((exponent + 14) << 10) + units);
}
inline unsigned short half_of_float(float value) { return half_of(value); }
inline unsigned int halves_of_floats(float low, float high) {
  return half_of(low) | static_cast<unsigned int>(half_of(high)) << 16;
}
inline unsigned short add_half(unsigned short a, unsigned short b) {  // a double holds the sum
  return half_of(static_cast<double>(float_of_half(a)) + float_of_half(b));
}
inline unsigned int add_halves(unsigned int a, unsigned int b) {
  return add_half(a & 0xffff, b & 0xffff) | static_cast<unsigned int>(add_half(a >> 16, b >> 16)) << 16;
}

// cvt.rn.f16x2.e4m3x2 by its definition: 4 exponent bits of bias 7, 3 fraction bits, one NaN.
inline unsigned short half_of_e4m3(unsigned int code) {
  int field = code >> 3 & 15, fraction = code & 7;
  double magnitude = field ? ldexp(8 + fraction, field - 10) : ldexp(fraction, -9);
  if ((code & 127) == 127) magnitude = NAN;
  return half_of(code >> 7 & 1 ? -magnitude : magnitude);
}
#define HAS_HALVES_OF_E4M3 1
inline unsigned int halves_of_e4m3(unsigned int codes) {
  return half_of_e4m3(codes & 255) | static_cast<unsigned int>(half_of_e4m3(codes >> 8 & 255)) << 16;
}

// Asynchronous copies: what they write is unknown until the thread has waited for their group.
struct Copy {
  char* to;
  const char* from;
  int bytes;
};
static unsigned long long copied = 0;
static std::vector<std::vector<Copy>> copies(1);  // the thread's groups; the last one is open
template <int BYTES>
inline void copy_async(void* to, const char* from) {
  if (reinterpret_cast<uintptr_t>(from) % BYTES) ++misaligned;
  ++copied;
  memset(to, 0xff, BYTES);
  copies.back().push_back({static_cast<char*>(to), from, BYTES});
}
inline void commit_copies() { copies.emplace_back(); }
template <int PENDING>
inline void wait_for_copies() {
  while (copies.size() > PENDING + 1) {
    for (const Copy& copy : copies.front()) memcpy(copy.to, copy.from, copy.bytes);
    copies.erase(copies.begin());
  }
}

// A block's dynamic shared memory.
static std::vector<uint4> shared_memory;
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(shared_memory.data())

template <class Arguments>
struct Running {
  static void (*kernel)(Arguments);
  static Arguments given;
  static void body() { kernel(given); }
};
template <class Arguments>
void (*Running<Arguments>::kernel)(Arguments);
template <class Arguments>
Arguments Running<Arguments>::given;

// 0, or 1 if the threads of a block wait at different barriers.
template <class Arguments>
inline int run_grid(void (*kernel)(Arguments), unsigned int grid, unsigned int block,
                    unsigned long long shared, const void* arguments) {
  typedef Running<Arguments> Now;
  Now::kernel = kernel;
  memcpy(static_cast<void*>(&Now::given), arguments, sizeof(Arguments));
  shared_memory.assign(shared / 16 + 1, uint4{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff});
  gridDim = {grid, 1, 1};
  blockDim = {block, 1, 1};
  for (blockIdx = {0, 0, 0}; blockIdx.x < grid; ++blockIdx.x) {
#ifdef FAKE_BARRIERS
    const size_t each = 1 << 16;
    static char* stacks = static_cast<char*>(malloc(1024 * each));
    if (run_block(Now::body, stacks, each, block)) return 1;
#else
    for (threadIdx = {0, 0, 0}; threadIdx.x < block; ++threadIdx.x) {
      Now::body();
      copies.assign(1, {});
    }
#endif
  }
  return 0;
}

#define KERNEL(number, arguments, ...)                                                     \
  extern "C" int kernel_##number(unsigned int grid, unsigned int block,                    \
                                 unsigned long long shared, const void* given) {          \
    return run_grid<arguments>(__VA_ARGS__, grid, block, shared, given);                   \
  }                                                                                        \
  extern "C" unsigned long long bytes_##number() { return sizeof(arguments); }
extern "C" unsigned long long count_misaligned() { return misaligned; }
extern "C" unsigned long long count_wide_loads() { return wide_loads; }
extern "C" unsigned long long count_copies() { return copied; }
