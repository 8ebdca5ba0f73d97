// bfloat16 as CUDA's header names it, for CuPy's class on top of it.
#pragma once

struct __nv_bfloat16 {
  unsigned short bits;

  __nv_bfloat16() = default;
  __nv_bfloat16(float value) {
    unsigned int whole = bits_as<unsigned int>(value);
    bits = value != value ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
  }
  operator float() const { return bits_as<float>(static_cast<unsigned int>(bits) << 16); }
};
inline bool operator==(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) == float(b); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  __nv_bfloat16 value;
  value.bits = bits;
  return value;
}
inline bool __hisnan(__nv_bfloat16 value) { return (value.bits & 0x7fff) > 0x7f80; }
inline bool __hisinf(__nv_bfloat16 value) { return (value.bits & 0x7fff) == 0x7f80; }
