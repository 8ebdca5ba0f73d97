// Philox4x64-10, the counter-based generator of stochastic rounding: any block at any time.
// The key is (seed, stream); a block's four words are eight lanes of 32 bits, low halves first.
#pragma once

#include "intrinsics.cuh"

struct Block {
  unsigned long long words[4];

  // Lane `index`, 0 to 7. Selections and shifts only, so that the words stay in registers.
  __device__ __forceinline__ unsigned int lane(int index) const {
    unsigned long long low = index & 2 ? words[1] : words[0];
    unsigned long long high = index & 2 ? words[3] : words[2];
    unsigned long long word = index & 4 ? high : low;
    return static_cast<unsigned int>(index & 1 ? word >> 32 : word);
  }
};

__device__ __forceinline__ Block philox(unsigned long long seed, unsigned long long c0,
                                        unsigned long long c1, unsigned long long c2,
                                        unsigned long long c3,
                                        unsigned long long stream) {
  const unsigned long long even = 0xD2E7470EE14C6C93ull, odd = 0xCA5A826395121157ull;
  unsigned long long k0 = seed, k1 = stream;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    unsigned long long high0 = __umul64hi(even, c0), low0 = even * c0;
    unsigned long long high1 = __umul64hi(odd, c2), low1 = odd * c2;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B97F4A7C15ull;
    k1 += 0xBB67AE8584CAA73Bull;
  }
  return {{c0, c1, c2, c3}};
}
