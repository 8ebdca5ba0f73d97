// round: one correct rounding of every element, nearest or stochastic, to any format.
// A fold's finish without a fold.
#include "finish.cuh"

struct Round {
  Layout layout;
  Finish finish;
};

template <class S, class C, int COUNT>
__global__ void __launch_bounds__(256, 1) round_to(const Round round) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const Chunk chunk = chunk_of<COUNT>(round.layout, thread);
  if (chunk.from >= chunk.to) return;
  const char* at = members_of(round.layout).at(0, chunk.offset);
  const bool whole = chunk.from == 0 && chunk.to == COUNT && round.layout.stride == S::BYTES &&
                     (reinterpret_cast<u64>(at) & (access_width(S::BYTES * COUNT) - 1)) == 0;
  Raw<S::BYTES, COUNT> raw =
      load_chunk<S::BYTES, COUNT>(at, round.layout.stride, chunk.from, chunk.to, whole);
  C values[COUNT];
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    values[index] = static_cast<C>(value_of(S(), raw.code(index)));
  }
  finish_chunk(values, round.finish, chunk, round.layout.out, chunk.from, chunk.to);
}
