// float16 as CUDA's header names it, for CuPy's class on top of it.
#pragma once

struct __half_raw {
  unsigned short x;
};
struct __half {
  unsigned short bits;

  __half() = default;
  __half(const __half_raw& raw) : bits(raw.x) {}
  __half(float value) : bits(half_of_float(value)) {}
  __half(double value) : bits(half_of_float(to_odd(value))) {}
  __half(int value) : __half(static_cast<double>(value)) {}
  __half(unsigned int value) : __half(static_cast<double>(value)) {}
  __half(long long value) : __half(static_cast<double>(value)) {}
  __half(unsigned long long value) : __half(static_cast<double>(value)) {}
  operator float() const { return float_of_half(bits); }
  operator __half_raw() const { return {bits}; }

  // float32 with the last bit set where anything is lost, so that a second rounding is exact.
  static float to_odd(double value) {
    float near = static_cast<float>(value);
    if (near == value || value != value || isinf(near)) return near;
    unsigned int bits = bits_as<unsigned int>(near);
    if (fabs(static_cast<double>(near)) > fabs(value)) --bits;
    return bits_as<float>(bits | 1);
  }
};
typedef __half half;
inline unsigned short __half_as_ushort(half value) { return value.bits; }
inline half __ushort_as_half(unsigned short bits) { return half(__half_raw{bits}); }
inline half __float2half(float value) { return half(value); }
inline half __float2half_rn(float value) { return half(value); }
inline float __half2float(half value) { return float(value); }
