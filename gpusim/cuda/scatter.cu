// scatter: array[place] = array[place] op value, one value after the other: NumPy's ufunc.at.
// Values come sorted by place, so a thread runs through those of one place, in their own order.
#include "rounding.cuh"

enum ScatterOp { ADD, SUBTRACT, MULTIPLY, DIVIDE, MAXIMUM, MINIMUM };

// All members have 8 bytes, so that the host lays it out as the device does.
struct Scatter {
  u64 array, values;  // the addresses of contiguous elements of one dtype,
  u64 places;         // of `count` 64-bit integers, ascending: positions in the array,
  u64 order;          // and of as many positions in the values; equal places keep their order
  i64 count, op;
  i64 first_of_equals;  // whether the maximum and minimum of equal numbers is the first of them
  i64 is_signed;        // of integers
  Target target;        // of formats of 8 bits
};

template <class C>
struct Complex {
  C real, imag;
};

// The code of a value, rounded to the format.
template <int FRACTION, int BIAS, Top TOP>
__device__ __forceinline__ u64 rounded(Float8<FRACTION, BIAS, TOP>, float value,
                                       const Target& target) {
  return code_of(round_to_target(value, target, false, 0), target);
}
__device__ __forceinline__ u64 rounded(float16, float value, const Target&) {
  return half_of_float(value);
}
__device__ __forceinline__ u64 rounded(bfloat16, float value, const Target&) {
  return __float_as_uint(round_bfloat16(value)) >> 16;
}
__device__ __forceinline__ u64 rounded(float32, float value, const Target&) {
  return __float_as_uint(value);
}
__device__ __forceinline__ u64 rounded(float64, double value, const Target&) {
  return static_cast<u64>(__double_as_longlong(value));
}
template <int BYTES, bool SIGNED>
__device__ __forceinline__ u64 rounded(Integer<BYTES, SIGNED>, u64 value, const Target&) {
  return value << (64 - 8 * BYTES) >> (64 - 8 * BYTES);
}

// a op b, in the computing type.
template <class C>
__device__ __forceinline__ C apply(C a, C b, const Scatter& scatter) {
  switch (scatter.op) {
    case ADD: return a + b;
    case SUBTRACT: return a - b;
    case MULTIPLY: return a * b;
    case DIVIDE: return a / b;
  }
  if (a != a || (a == b && scatter.first_of_equals)) return a;
  return (scatter.op == MAXIMUM ? a > b : a < b) ? a : b;
}
__device__ __forceinline__ u64 apply(u64 a, u64 b, const Scatter& scatter) {
  switch (scatter.op) {
    case ADD: return a + b;
    case SUBTRACT: return a - b;
    case MULTIPLY: return a * b;
  }
  bool more = scatter.is_signed ? static_cast<i64>(a) > static_cast<i64>(b) : a > b;
  return more == (scatter.op == MAXIMUM) ? a : b;
}
template <class C>
__device__ __forceinline__ Complex<C> apply(Complex<C> a, Complex<C> b, const Scatter& scatter) {
  switch (scatter.op) {
    case ADD: return {a.real + b.real, a.imag + b.imag};
    case SUBTRACT: return {a.real - b.real, a.imag - b.imag};
    case MULTIPLY:
      return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
    case DIVIDE: {  // Smith's method
      C real = b.real < 0 ? -b.real : b.real, imag = b.imag < 0 ? -b.imag : b.imag;
      if (real >= imag) {
        const C zero = 0;
        if (real == 0 && imag == 0) return {a.real / zero, a.imag / zero};
        C ratio = b.imag / b.real, scale = static_cast<C>(1) / (b.real + b.imag * ratio);
        return {(a.real + a.imag * ratio) * scale, (a.imag - a.real * ratio) * scale};
      }
      C ratio = b.real / b.imag, scale = static_cast<C>(1) / (b.imag + b.real * ratio);
      return {(a.real * ratio + a.imag) * scale, (a.imag * ratio - a.real) * scale};
    }
  }
  if (a.real != a.real || a.imag != a.imag) return a;
  if (b.real != b.real || b.imag != b.imag) return b;
  bool most = scatter.op == MAXIMUM;
  if (a.real != b.real) return (a.real > b.real) == most ? a : b;
  return a.imag == b.imag || (a.imag > b.imag) == most ? a : b;
}

// An element of PARTS numbers: in memory, and as it is computed with.
template <class S, int PARTS>
struct Element {
  typedef decltype(value_of(S(), 0u)) C;
  static constexpr int BYTES = S::BYTES;

  __device__ static __forceinline__ auto read(const char* at) {
    if constexpr (PARTS == 1) {
      return number(load_element<BYTES>(at));
    } else {
      return Complex<C>{number(load_element<BYTES>(at)), number(load_element<BYTES>(at + BYTES))};
    }
  }
  template <class V>
  __device__ static __forceinline__ V round(V value, const Target& target) {
    if constexpr (PARTS == 1) {
      return number(rounded(S(), value, target));
    } else {
      return value;
    }
  }
  template <class V>
  __device__ static __forceinline__ void write(char* at, V value, const Target& target) {
    if constexpr (PARTS == 1) {
      store_element<BYTES>(at, rounded(S(), value, target));
    } else {
      store_element<BYTES>(at, rounded(S(), value.real, target));
      store_element<BYTES>(at + BYTES, rounded(S(), value.imag, target));
    }
  }

 private:
  __device__ static __forceinline__ C number(u64 code) {
    if constexpr (BYTES == 8 || sizeof(C) == 8) {
      return value_of(S(), code);
    } else {
      return value_of(S(), static_cast<u32>(code));
    }
  }
};

template <class S, int PARTS>
__global__ void __launch_bounds__(256, 1) scatter(const Scatter scatter) {
  typedef Element<S, PARTS> E;
  constexpr int SIZE = PARTS * S::BYTES;
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= scatter.count) return;
  const i64* places = reinterpret_cast<const i64*>(scatter.places);
  const i64* order = reinterpret_cast<const i64*>(scatter.order);
  const i64 place = __ldg(places + thread);
  if (thread > 0 && __ldg(places + thread - 1) == place) return;
  // No other thread reads or writes this element.
  char* at = reinterpret_cast<char*>(scatter.array) + place * SIZE;
  const char* values = reinterpret_cast<const char*>(scatter.values);
  auto element = E::read(at);
  for (i64 next = thread; next < scatter.count && __ldg(places + next) == place; ++next) {
    auto value = E::read(values + __ldg(order + next) * SIZE);
    element = E::round(apply(element, value, scatter), scatter.target);
  }
  E::write(at, element, scatter.target);
}
