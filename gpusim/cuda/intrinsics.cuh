// CUDA beyond its language that the kernels use: conversions of float16, and shared memory.
// tests/cuda/host_cuda supplies the same names in plain C++, so that every source also runs on a host.
#pragma once

#ifdef __CUDACC__

// In PTX rather than through cuda_fp16.h: NVRTC then needs no folder of headers.
__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short half_of_float(float value) {  // to nearest, ties to even
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#define DYNAMIC_SHARED(type, name)                           \
  extern __shared__ __align__(16) unsigned char shared_[]; \
  type* name = reinterpret_cast<type*>(shared_)

#endif
