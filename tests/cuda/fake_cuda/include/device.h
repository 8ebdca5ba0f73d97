// CUDA's language for g++, included before every source that the fake NVRTC compiles: the header of
// the kernels' own tests, and what CuPy's kernels use beyond it. `launch` runs a grid.
#pragma once

#define __global__ __attribute__((externally_visible))
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#include <assert.h>
#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <initializer_list>
#include <limits>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "../../host_cuda/cuda_on_host.h"

#define __constant__ static
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) alignas(bytes)

// The threads of a block: loops, or fibers where the source has barriers.
typedef void (*Call)(void* kernel, void** parameters);
struct Entry {
  void* kernel;
  Call call;
};

template <class... A, size_t... I>
inline void call_with(void* kernel, void** parameters, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(A...)>(kernel)(*static_cast<A*>(parameters[I])...);
}
template <class... A>
inline void call(void* kernel, void** parameters) {
  call_with<A...>(kernel, parameters, std::index_sequence_for<A...>());
}
template <class... A>
inline Entry entry_of(void (*kernel)(A...)) {
  return {reinterpret_cast<void*>(kernel), &call<A...>};
}

inline Index place_of(unsigned int thread) {
  return {thread % blockDim.x, thread / blockDim.x % blockDim.y,
          thread / blockDim.x / blockDim.y};
}

#ifdef FAKE_BARRIERS
static Entry running;
static void** given;
inline void run_entry() { running.call(running.kernel, given); }
#endif

// While it lives, subnormal operands and results are zeros.
struct Flushing {
#if defined(__x86_64__)
  unsigned int before = _mm_getcsr();
  Flushing() { _mm_setcsr(before | 0x8040); }
  ~Flushing() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  unsigned long before = __builtin_aarch64_get_fpcr64();
  Flushing() { __builtin_aarch64_set_fpcr64(before | 1ul << 24); }
  ~Flushing() { __builtin_aarch64_set_fpcr64(before); }
#else
#error "how does this processor flush subnormals?"
#endif
};

// While it lives, a division of integers by zero ends the launch. On a GPU its result is unspecified.
static sigjmp_buf divided_by_zero;
struct Trapping {
  struct sigaction before;
  Trapping() {
    struct sigaction ours = {};
    ours.sa_handler = [](int) { siglongjmp(divided_by_zero, 1); };
    sigaction(SIGFPE, &ours, &before);
  }
  ~Trapping() { sigaction(SIGFPE, &before, nullptr); }
};

// Run a grid; nullptr, or what is wrong.
inline const char* launch(const Entry* entries, size_t count, void* kernel,
                          const unsigned int* size, size_t shared, void** parameters,
                          char* stacks, size_t stack_size) {
  const Entry* entry = entries;
  while (entry < entries + count && entry->kernel != kernel) ++entry;
  if (entry == entries + count) return "no such kernel in the module";
  gridDim = {size[0], size[1], size[2]};
  blockDim = {size[3], size[4], size[5]};
  shared_memory.assign(shared / 16 + 1, uint4{0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5, 0xa5a5a5a5});
  unsigned int threads = blockDim.x * blockDim.y * blockDim.z;
  unsigned long long before = misaligned;
#ifdef FAKE_FLUSH
  Flushing flushing;
#endif
  Trapping trapping;
  if (sigsetjmp(divided_by_zero, 1)) return "an integer is divided by zero";
  const char* wrong = nullptr;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z && !wrong; ++blockIdx.z) {
    for (blockIdx.y = 0; blockIdx.y < gridDim.y && !wrong; ++blockIdx.y) {
      for (blockIdx.x = 0; blockIdx.x < gridDim.x && !wrong; ++blockIdx.x) {
#ifdef FAKE_BARRIERS
        running = *entry;
        given = parameters;
        wrong = run_block(run_entry, stacks, stack_size, threads);
#else
        for (unsigned int thread = 0; thread < threads; ++thread) {
          threadIdx = place_of(thread);
          entry->call(kernel, parameters);
        }
#endif
      }
    }
  }
  if (misaligned != before) wrong = "misaligned access";
  return wrong;
}

// The mangled name of a kernel.
inline const char* name_of(const Entry& entry) {
  Dl_info found;
  return dladdr(entry.kernel, &found) ? found.dli_sname : nullptr;
}

#define KERNELS(...)                                                                           \
  static const Entry entries[] = {__VA_ARGS__};                                                \
  extern "C" __global__ const char* fake_launch(void* kernel, const unsigned int* size, size_t shared,    \
                                     void** parameters, char* stacks, size_t stack_size) {     \
    return launch(entries, sizeof entries / sizeof *entries, kernel, size, shared, parameters, \
                  stacks, stack_size);                                                         \
  }                                                                                            \
  extern "C" __global__ const char* fake_name(size_t index) { return name_of(entries[index]); }

// Functions of CUDA that C lacks, or has by other names.

#define CUDA_MIN_MAX(T)                                  \
  inline T min(T a, T b) { return b < a ? b : a; }       \
  inline T max(T a, T b) { return a < b ? b : a; }
CUDA_MIN_MAX(int)
CUDA_MIN_MAX(unsigned int)
CUDA_MIN_MAX(long)
CUDA_MIN_MAX(unsigned long)
CUDA_MIN_MAX(long long)
CUDA_MIN_MAX(unsigned long long)
#undef CUDA_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// A GPU's shifts: by 32 bits' width of the amount, and by the value's width where that is more.
template <class T, class U>
inline auto shift_left(T value, U amount) {
  auto wide = value << 0;
  unsigned int by = static_cast<unsigned int>(amount);
  return by < 8 * sizeof wide ? wide << by : decltype(wide){0};
}
template <class T, class U>
inline auto shift_right(T value, U amount) {
  auto wide = value >> 0;
  unsigned int by = static_cast<unsigned int>(amount), all = 8 * sizeof wide;
  return by < all ? wide >> by : wide >> (all - 1) >> 1;
}

inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline int __float_as_int(float value) { return bits_as<int>(value); }
inline float __int_as_float(int bits) { return bits_as<float>(bits); }
inline unsigned int __umulhi(unsigned int a, unsigned int b) {
  return static_cast<unsigned long long>(a) * b >> 32;
}
inline int __double2hiint(double value) { return bits_as<long long>(value) >> 32; }
inline int __double2loint(double value) { return static_cast<int>(bits_as<long long>(value)); }
inline double __hiloint2double(int high, int low) {
  return bits_as<double>(static_cast<long long>(high) << 32 | static_cast<unsigned int>(low));
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline double sinpi(double x) { return sin(M_PI * x); }
inline double cospi(double x) { return cos(M_PI * x); }

// The modified Bessel function of order zero, for numpy.i0 and numpy.kaiser: its power series.
inline double cyl_bessel_i0(double x) {
  double term = 1, sum = 1;
  for (int k = 1; term > 1e-17 * sum; ++k) sum += term *= x * x / 4 / k / k;
  return sum;
}
inline float cyl_bessel_i0f(float x) { return static_cast<float>(cyl_bessel_i0(x)); }
inline float cyl_bessel_i0(float x) { return cyl_bessel_i0f(x); }

// Atomic operations: threads run one at a time.

#define CUDA_ATOMICS(T)                                                                     \
  inline T atomicAdd(T* at, T value) { T old = *at; *at = old + value; return old; }        \
  inline T atomicExch(T* at, T value) { T old = *at; *at = value; return old; }             \
  inline T atomicCAS(T* at, T expected, T value) {                                          \
    T old = *at; if (old == expected) *at = value; return old;                              \
  }                                                                                         \
  inline T atomicMax(T* at, T value) { T old = *at; if (old < value) *at = value; return old; } \
  inline T atomicAnd(T* at, T value) { T old = *at; *at = old & value; return old; }        \
  inline T atomicOr(T* at, T value) { T old = *at; *at = old | value; return old; }         \
  inline T atomicXor(T* at, T value) { T old = *at; *at = old ^ value; return old; }
CUDA_ATOMICS(int)
CUDA_ATOMICS(unsigned int)
CUDA_ATOMICS(unsigned long long)
#undef CUDA_ATOMICS
inline int atomicMin(int* at, int value) { int old = *at; if (value < old) *at = value; return old; }
inline unsigned int atomicMin(unsigned int* at, unsigned int value) {
  unsigned int old = *at;
  if (value < old) *at = value;
  return old;
}
inline long long atomicMin(long long* at, long long value) {
  long long old = *at;
  if (value < old) *at = value;
  return old;
}
inline long long atomicMax(long long* at, long long value) {
  long long old = *at;
  if (old < value) *at = value;
  return old;
}
inline int atomicSub(int* at, int value) { return atomicAdd(at, -value); }
inline unsigned int atomicSub(unsigned int* at, unsigned int value) {
  return atomicAdd(at, 0u - value);
}
inline float atomicAdd(float* at, float value) { float old = *at; *at = old + value; return old; }
inline double atomicAdd(double* at, double value) { double old = *at; *at = old + value; return old; }
