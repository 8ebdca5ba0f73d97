// The members of a thread's chunk, and their loads: several at once, or the next one ahead.
#pragma once

#include "layout.cuh"

// The members of a chunk.
struct Chain {
  Members members;
  i64 stride, offset;
  i64 place;  // elements from the partial result's address to element 0
  i64 node;   // the first member's number among the nodes of its level, in a tree
  int count, from, to;
  bool whole;  // whether a chunk is read by wide accesses
};

template <class S, int COUNT>
__device__ __forceinline__ Raw<S::BYTES, COUNT> read(const Chain& chain, int member) {
  return load_chunk<S::BYTES, COUNT>(chain.members.at(member, chain.offset), chain.stride, chain.from,
                                     chain.to, chain.whole);
}

__device__ __forceinline__ int around(int member, int count) {
  return member < count ? member : member - count;
}

// Members first, first + 1, ... and around, `rest` of them (at most AHEAD). All addresses of a list
// are loaded before its members.
template <class S, int COUNT, int AHEAD>
__device__ __forceinline__ void read_batch(Raw<S::BYTES, COUNT> (&raw)[AHEAD], const Chain& chain,
                                           int first, int rest) {
  if (chain.members.table) {
    const char* at[AHEAD];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      at[ahead] = chain.members.at(around(ahead < rest ? first + ahead : first, chain.count), chain.offset);
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      raw[ahead] = load_chunk<S::BYTES, COUNT>(at[ahead], chain.stride, chain.from, chain.to,
                                               chain.whole, ahead < rest);
    }
  } else {
    const i64 stride = chain.members.stride, back = stride - chain.count * stride;
    const char* at = chain.members.at(first, chain.offset);
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      raw[ahead] = load_chunk<S::BYTES, COUNT>(at, chain.stride, chain.from, chain.to, chain.whole,
                                               ahead < rest);
      at += first + ahead + 1 == chain.count ? back : stride;
    }
  }
}
