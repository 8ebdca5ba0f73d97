// CUDA beyond its language that the kernels use: float16, asynchronous copies, and shared memory.
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

// Two float16 in one word, the first in its low half. A word is one operand of the additions below.
__device__ __forceinline__ unsigned int halves_of_floats(float low, float high) {
#if __CUDA_ARCH__ >= 800
  unsigned int word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
  return half_of_float(low) | static_cast<unsigned int>(half_of_float(high)) << 16;
#endif
}

#if __CUDA_ARCH__ >= 800
#define HAS_BFLOATS_OF_FLOATS 1

// Two bfloat16 in one word, rounded to nearest, ties to even.
__device__ __forceinline__ unsigned int bfloats_of_floats(float low, float high) {
  unsigned int word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#endif

// Both sums are rounded once, to float16. No `.ftz` here: subnormal numbers stay, whatever the
// compiler's options are.
__device__ __forceinline__ unsigned int add_halves(unsigned int left, unsigned int right) {
  unsigned int sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(left), "r"(right));
  return sum;
}

#if __CUDA_ARCH__ >= 890
#define HAS_HALVES_OF_E4M3 1

// Two codes of float8_e4m3fn, exactly: float16 has all its values.
__device__ __forceinline__ unsigned int halves_of_e4m3(unsigned int codes) {
  unsigned int halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(codes)));
  return halves;
}
#endif

// 16 bytes if `present`, else whatever was in the registers. The load is predicated and stays where
// it is: behind a branch the compiler may put the use of one load before the next load.
__device__ __forceinline__ uint4 load_if(const char* at, bool present) {
  uint4 four;
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n"
      " @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
      : "l"(at), "r"(static_cast<unsigned int>(present)));
  return four;
}

// A copy of 4 or 8 bytes from global to shared memory that needs no register on its way. A thread
// commits its copies in groups, and waits until all groups but the last PENDING have arrived.
#if __CUDA_ARCH__ >= 800

template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const char* from) {
  unsigned int shared = static_cast<unsigned int>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(BYTES)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

#else  // without the instruction: loads, and stores to shared memory

template <int BYTES>
__device__ __forceinline__ void copy_async(void* to, const char* from) {
  if constexpr (BYTES == 4) {
    *static_cast<unsigned int*>(to) = __ldg(reinterpret_cast<const unsigned int*>(from));
  } else {
    *static_cast<uint2*>(to) = __ldg(reinterpret_cast<const uint2*>(from));
  }
}

__device__ __forceinline__ void commit_copies() {}

template <int PENDING>
__device__ __forceinline__ void wait_for_copies() {}

#endif

#define DYNAMIC_SHARED(type, name)                           \
  extern __shared__ __align__(16) unsigned char shared_[]; \
  type* name = reinterpret_cast<type*>(shared_)

#endif
