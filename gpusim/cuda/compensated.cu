// compensated: linear sums that keep what each addition loses: docs/numerics.md has the operations.
// Each thread has an element, its sum and its compensation, and loads four members ahead.
#include "finish.cuh"

// All members have 8 bytes, so that the host lays it out as the device does.
struct Compensated {
  Layout layout;
  Finish finish;
  Target accumulator;
  i64 rounding;  // a Rounding of all operations, to nearest
  i64 neumaier;  // or Kahan's operations
};

template <class C>
__device__ __forceinline__ C magnitude_of(C value) {
  typedef Bits<C> B;
  return B::value(B::of(value) << 1 >> 1);
}

template <class S, class C>
__global__ void __launch_bounds__(256, 1) compensated(const Compensated given) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  Chunk chunk = chunk_of<1>(given.layout, thread);
  if (chunk.from >= chunk.to) return;
  const Members members = members_of(given.layout);
  const int count = static_cast<int>(given.layout.members);
  const auto member_value = [&](int member) {
    const char* at = members.at(member, chunk.offset);
    return static_cast<C>(value_of(S(), load_element<S::BYTES>(at)));
  };
  const auto round = [&](C value) {
    return rounded_to(value, given.rounding, given.accumulator, false, 0u);
  };
  C total = member_value(0), lost = 0;
#pragma unroll 4
  for (int member = 1; member < count; ++member) {
    const C value = member_value(member);
    C following;
    if (given.neumaier) {
      following = round(total + value);
      const bool keeps = magnitude_of(total) >= magnitude_of(value);
      const C large = keeps ? total : value, small = keeps ? value : total;
      lost = round(lost + round(round(large - following) + small));
    } else {
      const C term = round(value - lost);
      following = round(total + term);
      lost = round(round(following - total) - term);
    }
    if (!(lost - lost == 0)) lost = 0;  // infinity or NaN
    total = following;
  }
  if (given.neumaier && lost != 0) total = round(total + lost);
  C result[1] = {total};
  finish_chunk(result, given.finish, chunk, given.layout.out, chunk.from, chunk.to);
}
