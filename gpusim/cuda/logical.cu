// logical_and and logical_or of any dtype, and max and min of bool: 0 or 1, in any dtype.
// These operators do not round, so the order does not matter.
#include "layout.cuh"

struct Logical {
  Layout layout;
  i64 all;             // whether all members have to be nonzero, or one of them
  u64 mask;            // the bits of an 8-byte word (or of the element) that make it nonzero
  u64 one;             // the output's code of 1
  i64 bytes;           // of an output element; of 16 bytes the second eight are zero
  u64 partial;         // the address of the earlier members' result, a byte per value, or 0
  i64 share;           // members that a block folds, if several blocks share the members; or 0
  i64 share_blocks;    // the blocks that hold every element once
};

template <int BYTES, int COUNT>
__device__ __forceinline__ u32 nonzero(const Raw<BYTES, COUNT>& raw, u64 mask) {
  u32 flags = 0;
#pragma unroll
  for (int index = 0; index < COUNT; ++index) flags |= (raw.code(index) & mask ? 1u : 0u) << index;
  return flags;
}

// WORDS: 2 for complex128, whose parts are read as two elements of 8 bytes; else 1.
template <int BYTES, int WORDS>
__global__ void __launch_bounds__(256, 1) logical(const Logical logical) {
  constexpr int COUNT = 16 / BYTES, AHEAD = 8;
  constexpr u32 PAIRS = 0x55555555u;
  const Share share = share_of(logical.layout, logical.share, logical.share_blocks);
  Chunk chunk = chunk_of<COUNT>(logical.layout, share.thread);
  if (chunk.from >= chunk.to) return;
  chunk.out_offset += share.out_offset;
  const Members members = members_of(logical.layout).from(share.first);
  const bool whole = chunk.from == 0 && chunk.to == COUNT && logical.layout.stride == BYTES &&
                     logical.layout.alike >= 16 &&
                     (reinterpret_cast<u64>(members.at(0, chunk.offset)) & 15) == 0;
  u32 flags = logical.all ? ~0u : 0u;
#pragma unroll 1
  for (int first = 0; first < share.count; first += AHEAD) {
    const int rest = share.count - first;
    Raw<BYTES, COUNT> raw[AHEAD];
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      const char* at = members.at(ahead < rest ? first + ahead : first, chunk.offset);
      raw[ahead] = load_chunk<BYTES, COUNT>(at, logical.layout.stride, chunk.from, chunk.to, whole,
                                            ahead < rest);
    }
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      if (ahead >= rest) continue;
      u32 here = nonzero(raw[ahead], logical.mask);
      if (WORDS == 2) here = (here | here >> 1) & PAIRS;
      flags = logical.all ? flags & here : flags | here;
    }
  }
  char* out = reinterpret_cast<char*>(logical.layout.out);
#pragma unroll
  for (int index = 0; index < COUNT; index += WORDS) {
    if (index + WORDS <= chunk.from || index >= chunk.to) continue;
    const i64 place = (chunk.out_offset + index) / WORDS;
    bool one = flags >> index & 1;
    if (logical.partial) {
      bool earlier = load_element<1>(reinterpret_cast<const char*>(logical.partial) + place);
      one = logical.all ? one && earlier : one || earlier;
    }
    u64 code = one ? logical.one : 0;
    char* at = out + place * logical.bytes;
    if (logical.bytes == 1) store_element<1>(at, code);
    if (logical.bytes == 2) store_element<2>(at, code);
    if (logical.bytes == 4) store_element<4>(at, code);
    if (logical.bytes >= 8) store_element<8>(at, code);
    if (logical.bytes == 16) store_element<8>(at + 8, 0);
  }
}
