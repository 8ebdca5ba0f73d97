// The arguments of a fold, and what follows from them: a tree's steps, a ring's blocks.
#pragma once

#include "finish.cuh"

enum Op { SUM, PROD, MAX, MIN, COMPLEX_PROD };
enum Order { SEQUENCE, TREE };  // linear, reverse and ring add the members in sequence
enum Step { EXACT, FLOAT16, BFLOAT16, TARGET };  // what partial results are rounded to
enum Ring { NO_RING, FLAT_RING, SLICED_RING, LISTED_RING };

// All members have 8 bytes, so that the host lays it out as the device does.
struct Fold {
  Layout layout;
  Finish finish;
  Target accumulator;
  i64 op;
  i64 parts;         // 2: the elements are complex, two reals each
  i64 ring;          // how the ring's blocks are cut
  i64 total;         // elements of the whole value, for a FLAT_RING
  i64 slice, count;  // a SLICED_RING's block of element i is (i / slice) % count
  u64 before;        // how many members have been folded before these,
  u64 partial;       // the address of their partial result, which is contiguous,
  i64 stored;        // its Encoding, and its bytes
  i64 stored_bytes;
  i64 leaves, level, node;  // the members are nodes `node` and on of that level of a tree
  u64 edges, starts;  // a LISTED_RING's blocks: edges[k]..edges[k + 1] begin at member starts[k], or
                      // at instruction starts[k] of `graph`
  u64 graph;          // of a TREE whose pairs are not neighbours: its instructions, or 0
  i64 instructions;   // m >= 0 pushes member m, -k adds the two last values as step k
  i64 share;          // members that a block folds, if several blocks share the members; or 0
  i64 share_blocks;   // the blocks that hold every element once
  i64 batches;        // of in_stages: batches of members in a stage
};

// A partial result as it is handed on, in BYTES bytes: a double as it is; another float in float32,
// in a format of two bytes, or in the members' own; an integer in the accumulator.
template <class S, class C, int BYTES>
__device__ __forceinline__ C value_of_partial(u64 code, const Fold& fold) {
  if constexpr (!IsFloat<C>::value) return static_cast<C>(wrapped(code, fold.finish));
  if constexpr (BYTES == 8) return static_cast<C>(value_of(float64(), code));
  const u32 word = static_cast<u32>(code);
  if constexpr (BYTES == 4) return static_cast<C>(value_of(float32(), word));
  if constexpr (BYTES == 1) return static_cast<C>(value_of(S(), word));
  return fold.stored == AS_FLOAT16 ? value_of(float16(), word) : value_of(bfloat16(), word);
}

// The step at which node `index` of the level above `level` is made, both counted from the members:
// the levels below it hold leaves - ceil(leaves / 2**level) additions.
__device__ __forceinline__ u64 tree_step(const Fold& fold, i64 node, int level, int index) {
  i64 depth = fold.level + level;
  i64 left = (fold.leaves + (1ll << depth) - 1) >> depth;
  return static_cast<u64>(fold.leaves - left + (node >> (level + 1)) + index + 1);
}

// The block of a ring that element i is in.
__device__ __forceinline__ int ring_block(const Fold& fold, i64 index) {
  i64 i = fold.parts == 2 ? index >> 1 : index;
  if (fold.ring == LISTED_RING) {
    const i64* edges = reinterpret_cast<const i64*>(fold.edges);
    i64 low = 0, high = fold.count;  // edges[low] <= i < edges[high]
    while (high - low > 1) {
      i64 middle = (low + high) >> 1;
      if (__ldg(edges + middle) <= i) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return static_cast<int>(low);
  }
  if (fold.ring == SLICED_RING) {
    i64 slice = quotient(i, fold.slice);
    return static_cast<int>(slice - quotient(slice, fold.count) * fold.count);
  }
  i64 length = quotient(fold.total, fold.layout.members);
  i64 longer = fold.total - length * fold.layout.members;
  i64 edge = longer * (length + 1);
  if (i < edge) return static_cast<int>(quotient(i, length + 1));
  return static_cast<int>(longer + quotient(i - edge, length));
}

// The member at which a block's chain starts, or its graph's first instruction.
__device__ __forceinline__ int ring_start(const Fold& fold, int block) {
  if (fold.ring != LISTED_RING) return block;
  return static_cast<int>(__ldg(reinterpret_cast<const i64*>(fold.starts) + block));
}
