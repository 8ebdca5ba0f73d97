// fixed: a sum of integers, docs/numerics.md's order "fixed". A thread block has the elements of one
// unit, a power of two that leaves room for all members, and reads the members twice: the largest
// magnitude decides the unit. Doubles hold the integers.
#include "finish.cuh"

// All members have 8 bytes, so that the host lays it out as the device does.
struct Fixed {
  u64 base, table;
  i64 stride, members;  // as of Sent
  i64 pitch, entries, elements;
  i64 bits;             // of the integers: less their sign, and a bit for each doubling of members
  Finish finish;
  u64 out;
};

const int UNIT = 256;  // elements, and threads

__device__ __forceinline__ bool is_finite(double value) { return value - value == 0; }

template <class S>
__device__ __forceinline__ double value_at(const Members& members, int member, i64 offset) {
  return static_cast<double>(value_of(S(), load_element<S::BYTES>(members.at(member, offset))));
}

template <class S>
__global__ void __launch_bounds__(UNIT) fixed(const Fixed fixed) {
  const i64 units = quotient(fixed.elements + UNIT - 1, UNIT);
  const i64 entry = quotient(blockIdx.x, units);
  const i64 index = (blockIdx.x - entry * units) * UNIT + threadIdx.x;
  const bool exists = index < fixed.elements;
  const int count = exists ? static_cast<int>(fixed.members) : 0;
  const Members members = {reinterpret_cast<const char*>(fixed.base),
                           reinterpret_cast<const u64*>(fixed.table), fixed.stride};
  const i64 offset = entry * fixed.pitch + index * S::BYTES;
  double largest = 0;
#pragma unroll 4
  for (int member = 0; member < count; ++member) {
    const double magnitude = fabs(value_at<S>(members, member, offset));
    if (is_finite(magnitude) && magnitude > largest) largest = magnitude;
  }
  __shared__ double found[UNIT];
  found[threadIdx.x] = largest;
#pragma unroll 1
  for (int half = UNIT / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half && found[threadIdx.x + half] > found[threadIdx.x]) {
      found[threadIdx.x] = found[threadIdx.x + half];
    }
  }
  __syncthreads();
  if (!exists) return;
  int exponent;
  frexp(found[0], &exponent);
  exponent -= static_cast<int>(fixed.bits);
  double total = 0, special = 0;
#pragma unroll 4
  for (int member = 0; member < count; ++member) {
    const double value = value_at<S>(members, member, offset);
    const bool finite = is_finite(value);
    total = total + rint(ldexp(finite ? value : 0, -exponent));
    special = special + (finite ? 0 : value);
  }
  double values[1] = {special != 0 ? special : ldexp(total, exponent)};
  const Finish& finish = fixed.finish;
  values[0] = last_value(values[0], finish, 0u);
  if (finish.encoding == AS_FLOAT8) {
    values[0] = __uint_as_float(code_of(static_cast<float>(values[0]), finish.target));
  }
  store_values(values, finish, fixed.out, entry * fixed.elements + index, 0, 1);
}
