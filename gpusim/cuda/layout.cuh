// The elements of a thread: a chunk of consecutive elements of a row, and where they lie.
// Rows are the contiguous (or evenly strided) runs of a value; chunks align with Philox's blocks.
#pragma once

#include "rounding.cuh"

const int AXES = 8;  // outer axes of a layout, after neighbours were merged

// All members have 8 bytes, so that the host lays it out as the device does.
struct Layout {
  u64 base;           // the first member's address, where no table is given
  u64 table;          // the members' addresses, or 0
  i64 member_stride;  // bytes from member to member, where no table is given
  i64 members;
  i64 alike;             // all members' addresses agree modulo this power of two, at most 16
  i64 rows, length;      // length: the elements of a row
  i64 chunks;            // chunks that a row may touch
  i64 stride;            // bytes from element to element of a row
  i64 axes;              // outer axes
  i64 sizes[AXES];       // their lengths, the innermost first
  i64 strides[AXES];     // and the bytes from one position to the next
  i64 rows_of_value;     // rows in one batch entry
  i64 first;             // the index, in the whole value, of the first element held
  i64 shift;             // chunks begin where index + shift is a multiple of their length
  u64 out;               // the output's address; it is contiguous
};

__device__ __forceinline__ i64 quotient(i64 a, i64 b) {  // of non-negative numbers
  if (((a | b) >> 32) == 0) return static_cast<u32>(a) / static_cast<u32>(b);
  return a / b;
}

struct Chunk {
  i64 index;  // of its element 0, in the whole value; elements from..to-1 exist
  int from, to;
  i64 entry;       // the batch entry
  i64 offset;      // bytes from a member's address to element 0
  i64 out_offset;  // elements from the output's address to element 0
};

template <int COUNT>
__device__ __forceinline__ Chunk chunk_of(const Layout& layout, i64 thread) {
  Chunk chunk;
  chunk.from = chunk.to = 0;
  i64 row = layout.rows == 1 ? 0 : quotient(thread, layout.chunks);
  if (row >= layout.rows) return chunk;
  i64 place_in_row = thread - row * layout.chunks;
  chunk.entry = layout.rows == 1 ? 0 : quotient(row, layout.rows_of_value);
  i64 begin = layout.first + (row - chunk.entry * layout.rows_of_value) * layout.length;
  i64 number = (begin + layout.shift) / COUNT + place_in_row;
  chunk.index = number * COUNT - layout.shift;
  i64 before = begin - chunk.index, after = before + layout.length;
  if (after <= 0) return chunk;
  chunk.from = before > 0 ? static_cast<int>(before) : 0;
  chunk.to = after < COUNT ? static_cast<int>(after) : COUNT;
  chunk.offset = -before * layout.stride;
  chunk.out_offset = row * layout.length - before;
#pragma unroll 1
  for (int axis = 0; axis < layout.axes; ++axis) {
    i64 rest = quotient(row, layout.sizes[axis]);
    chunk.offset += (row - rest * layout.sizes[axis]) * layout.strides[axis];
    row = rest;
  }
  return chunk;
}

struct Members {
  const char* base;
  const u64* table;
  i64 stride;

  __device__ __forceinline__ const char* at(int member, i64 offset) const {
    if (table) return reinterpret_cast<const char*>(__ldg(table + member)) + offset;
    return base + member * stride + offset;
  }

  __device__ __forceinline__ Members from(int member) const {  // without those before it
    return {base + member * stride, table ? table + member : table, stride};
  }
};

// What a thread folds. If blocks share the members, those of the same elements are `blocks` apart:
// the first ones fold the first `members`, to a result of their own.
struct Share {
  i64 thread;  // among those of its share
  int first, count;
  i64 out_offset;
};

__device__ __forceinline__ Share share_of(const Layout& layout, i64 members, i64 blocks) {
  const int count = static_cast<int>(layout.members);
  if (!members) return {static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, 0, count, 0};
  const u32 number = blockIdx.x / static_cast<u32>(blocks);
  const u32 block = blockIdx.x - number * static_cast<u32>(blocks);
  const int first = static_cast<int>(number) * static_cast<int>(members), rest = count - first;
  return {static_cast<i64>(block) * blockDim.x + threadIdx.x, first,
          rest < members ? rest : static_cast<int>(members),
          static_cast<i64>(number) * layout.rows * layout.length};
}

__device__ __forceinline__ Members members_of(const Layout& layout) {
  return {reinterpret_cast<const char*>(layout.base),
          reinterpret_cast<const u64*>(layout.table), layout.member_stride};
}
