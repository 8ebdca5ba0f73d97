// The names of CUDA that the kernels' headers use, for a C++ compiler (Clang) and one CPU thread.
#pragma once

#include "cuda_bits.h"

#define __global__ static
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)

struct Position {  // of a thread, which tiles do without
  unsigned int x, y, z;
};
static const Position threadIdx = {}, blockIdx = {}, blockDim = {}, gridDim = {};

inline double fmod(double a, double b) { return __builtin_fmod(a, b); }
inline double rint(double a) { return __builtin_rint(a); }

inline float float_of_half(unsigned short bits) { return bits_as<_Float16>(bits); }
inline unsigned short half_of_float(float value) {
  return bits_as<unsigned short>(static_cast<_Float16>(value));
}
inline unsigned int halves_of_floats(float low, float high) {
  return half_of_float(low) | static_cast<unsigned int>(half_of_float(high)) << 16;
}

// NumPy's arrays may lie at any address.
template <class T>
inline T __ldg(const T* at) {
  T value;
  __builtin_memcpy(&value, at, sizeof(T));
  return value;
}
inline uint4 load_if(const char* at, bool present) {
  return present ? __ldg(reinterpret_cast<const uint4*>(at)) : uint4{0, 0, 0, 0};
}
