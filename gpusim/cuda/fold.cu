// fold: each thread reduces a chunk of consecutive elements over all members, in registers.
// Inputs are read once, 16 bytes at a time and several members ahead; nothing is shared.
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
  u64 edges, starts;  // a LISTED_RING's blocks: edges[k]..edges[k + 1] begin at member starts[k]
  u64 graph;          // of a TREE whose pairs are not neighbours: its instructions, or 0
  i64 instructions;   // m >= 0 pushes member m, -k adds the two last values as step k
};

template <class S>
struct IsInteger {
  static constexpr bool value = false;
  static constexpr bool SIGNED = false;
};
template <int BYTES, bool SIGNED_>
struct IsInteger<Integer<BYTES, SIGNED_>> {
  static constexpr bool value = true;
  static constexpr bool SIGNED = SIGNED_;
};
template <class S>
constexpr __device__ bool is_signed() {
  return S::SIGNED;
}

// max and min as the contract has them: NaN wins, and -0 < +0.
template <class C>
__device__ __forceinline__ C extreme(C a, C b, bool most) {
  typedef Bits<C> B;
  if (a != a) return a;
  if (b != b) return b;
  if (a == b) return B::value(most ? B::of(a) & B::of(b) : B::of(a) | B::of(b));
  return (a > b) == most ? a : b;
}

// One operation on a chunk: `left op right`, into left.
template <class S, class C, bool SUMS, int COUNT>
__device__ __forceinline__ void combine(C (&left)[COUNT], const C (&right)[COUNT], i64 op) {
  if constexpr (SUMS) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) left[index] = left[index] + right[index];
  } else if (op == PROD) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) left[index] = left[index] * right[index];
  } else if (op == MAX || op == MIN) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      if constexpr (IsFloat<C>::value) {
        left[index] = extreme(left[index], right[index], op == MAX);
      } else {
        bool more;
        if constexpr (is_signed<S>()) {
          more = sizeof(C) == 8 ? static_cast<i64>(left[index]) > static_cast<i64>(right[index])
                                : static_cast<int>(left[index]) > static_cast<int>(right[index]);
        } else {
          more = left[index] > right[index];
        }
        left[index] = more == (op == MAX) ? left[index] : right[index];
      }
    }
  } else if constexpr (IsFloat<C>::value && COUNT % 2 == 0) {  // COMPLEX_PROD
#pragma unroll
    for (int index = 0; index < COUNT; index += 2) {
      C a = left[index], b = left[index + 1], c = right[index], d = right[index + 1];
      C first = a * c, second = b * d, third = a * d, fourth = b * c;
      left[index] = first - second;
      left[index + 1] = third + fourth;
    }
  }
}

// The rounding after one operation, step `step` of the order's enumeration.
template <class C, int STEP, bool DRAWN, int COUNT>
__device__ __forceinline__ void round_step(C (&values)[COUNT], const Target& target,
                                           const Draw& draw, u64 step) {
  if constexpr (STEP == EXACT) return;
  Block block = {};
  if constexpr (DRAWN) block = draw.at(step);  // the chunk is one of Philox's blocks
  if constexpr (STEP == TARGET) {
#pragma unroll 1
    for (int index = 0; index < COUNT; ++index) {
      turn(values, round_to_target(values[0], target, DRAWN, DRAWN ? block.lane(index) : 0u));
    }
  } else {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      float value = static_cast<float>(values[index]);
      if constexpr (DRAWN) {
        u32 lane = block.lane(index);
        value = STEP == FLOAT16 ? draw_float16(value, lane) : draw_bfloat16(value, lane);
      } else {
        value = STEP == FLOAT16 ? float_of_half(half_of_float(value)) : round_bfloat16(value);
      }
      values[index] = value;
    }
  }
}

template <class S, class C, int COUNT>
__device__ __forceinline__ void decode(const Raw<S::BYTES, COUNT>& raw, C (&values)[COUNT]) {
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    values[index] = static_cast<C>(value_of(S(), raw.code(index)));
  }
}

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

template <class S, class C, int BYTES, int COUNT>
__device__ __forceinline__ void take(C (&total)[COUNT], const Fold& fold, i64 place, int from,
                                     int to) {
  const char* at = reinterpret_cast<const char*>(fold.partial) + place * BYTES;
  const bool whole = from == 0 && to == COUNT &&
                     (reinterpret_cast<u64>(at) & (access_width(BYTES * COUNT) - 1)) == 0;
  Raw<BYTES, COUNT> raw = load_chunk<BYTES, COUNT>(at, BYTES, from, to, whole);
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    total[index] = value_of_partial<S, C, BYTES>(raw.code(index), fold);
  }
}

// The partial result of the members before these.
template <class S, class C, int COUNT>
__device__ __forceinline__ void take_partial(C (&total)[COUNT], const Fold& fold, i64 place,
                                             int from, int to) {
  constexpr bool FLOAT = IsFloat<C>::value;
  if constexpr (sizeof(C) == 8) {
    if (FLOAT || fold.stored_bytes == 8) take<S, C, 8>(total, fold, place, from, to);
  }
  if constexpr (!FLOAT || sizeof(C) == 4) {
    if (fold.stored_bytes == 4) take<S, C, 4>(total, fold, place, from, to);
    if (fold.stored_bytes == 2) take<S, C, 2>(total, fold, place, from, to);
  }
  if constexpr (!FLOAT || (sizeof(C) == 4 && S::BYTES == 1)) {
    if (fold.stored_bytes == 1) take<S, C, 1>(total, fold, place, from, to);
  }
}

// The members of a chunk, which are added one after the other.
struct Chain {
  Members members;
  i64 stride, offset;
  i64 place;  // elements from the partial result's address to element 0
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

// Members start, start + 1, ... and around, one after the other. AHEAD of them are loaded at once;
// if that is one, it is loaded while the one before it is added.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT, int AHEAD>
__device__ __forceinline__ void in_sequence(C (&total)[COUNT], const Chain& chain, int start,
                                            const Fold& fold, const Draw& draw) {
  const int count = chain.count;
  C next[COUNT];
  decode<S>(read<S, COUNT>(chain, start), total);
  if (fold.before) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) next[index] = total[index];
    take_partial<S>(total, fold, chain.place, chain.from, chain.to);
    combine<S, C, SUMS>(total, next, fold.op);
    round_step<C, STEP, DRAWN>(total, fold.accumulator, draw, fold.before);
  }
  int seen = 1;  // members; adding the next one is step before + seen
  if constexpr (AHEAD > 1) {
    for (; seen + AHEAD <= count; seen += AHEAD) {
      Raw<S::BYTES, COUNT> raw[AHEAD];
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        raw[ahead] = read<S, COUNT>(chain, around(start + seen + ahead, count));
      }
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        decode<S>(raw[ahead], next);
        combine<S, C, SUMS>(total, next, fold.op);
        round_step<C, STEP, DRAWN>(total, fold.accumulator, draw, fold.before + seen + ahead);
      }
    }
  }
  if (seen >= count) return;
  Raw<S::BYTES, COUNT> coming = read<S, COUNT>(chain, around(start + seen, count));
#pragma unroll 1
  for (; seen < count; ++seen) {
    decode<S>(coming, next);
    if (seen + 1 < count) coming = read<S, COUNT>(chain, around(start + seen + 1, count));
    combine<S, C, SUMS>(total, next, fold.op);
    round_step<C, STEP, DRAWN>(total, fold.accumulator, draw, fold.before + seen);
  }
}

// The step at which node `index` of the level above `level` is made, both counted from the members:
// the levels below it hold leaves - ceil(leaves / 2**level) additions.
__device__ __forceinline__ u64 tree_step(const Fold& fold, int level, int index) {
  i64 depth = fold.level + level;
  i64 left = (fold.leaves + (1ll << depth) - 1) >> depth;
  return static_cast<u64>(fold.leaves - left + (fold.node >> (level + 1)) + index + 1);
}

// Eight members (or as many as there are) become one subtree, in registers.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT>
__device__ __forceinline__ void subtree(C (&total)[COUNT], const Chain& chain, int first,
                                        const Fold& fold, const Draw& draw) {
  const int here = chain.count - first < 8 ? chain.count - first : 8;
  Raw<S::BYTES, COUNT> raw[8];
#pragma unroll
  for (int member = 0; member < 8; ++member) {
    if (member < here) raw[member] = read<S, COUNT>(chain, first + member);
  }
  C nodes[4][COUNT], right[COUNT];
#pragma unroll
  for (int node = 0; node < 4; ++node) {
    if (2 * node >= here) continue;
    decode<S>(raw[2 * node], nodes[node]);
    if (2 * node + 1 >= here) continue;
    decode<S>(raw[2 * node + 1], right);
    combine<S, C, SUMS>(nodes[node], right, fold.op);
    round_step<C, STEP, DRAWN>(nodes[node], fold.accumulator, draw,
                               tree_step(fold, 0, first / 2 + node));
  }
#pragma unroll
  for (int level = 1; level < 3; ++level) {  // node k of a level is kept in nodes[k << level]
#pragma unroll
    for (int node = 0; node < 4; node += 1 << level) {
      const int other = node + (1 << (level - 1));
      if (2 * other >= here) continue;
      combine<S, C, SUMS>(nodes[node], nodes[other], fold.op);
      round_step<C, STEP, DRAWN>(nodes[node], fold.accumulator, draw,
                                 tree_step(fold, level, (first / 2 + node) >> level));
    }
  }
#pragma unroll
  for (int element = 0; element < COUNT; ++element) total[element] = nodes[0][element];
}

// The additions of any graph, by a machine with a stack in shared memory, as in in_a_tree; its last
// value is `total`.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT>
__device__ __forceinline__ void by_graph(C (&total)[COUNT], const Chain& chain, const Fold& fold,
                                           const Draw& draw) {
  DYNAMIC_SHARED(C, stack);
  const i64* graph = reinterpret_cast<const i64*>(fold.graph);
  C* slot = stack + threadIdx.x;  // of the next value but the last
#pragma unroll 1
  for (i64 at = 0; at < fold.instructions; ++at) {
    const i64 instruction = __ldg(graph + at);
    if (instruction >= 0) {
      if (at) {
#pragma unroll
        for (int element = 0; element < COUNT; ++element) slot[element * blockDim.x] = total[element];
        slot += COUNT * blockDim.x;
      }
      decode<S>(read<S, COUNT>(chain, static_cast<int>(instruction)), total);
    } else {
      C left[COUNT];
      slot -= COUNT * blockDim.x;
#pragma unroll
      for (int element = 0; element < COUNT; ++element) left[element] = slot[element * blockDim.x];
      combine<S, C, SUMS>(left, total, fold.op);
      round_step<C, STEP, DRAWN>(left, fold.accumulator, draw, static_cast<u64>(-instruction));
#pragma unroll
      for (int element = 0; element < COUNT; ++element) total[element] = left[element];
    }
  }
}

// Neighbours in pairs, level by level. A stack in shared memory, with columns of its own for each
// thread, holds one partial result per level, like a binary counter. AHEAD members (8 or 1) make
// its leaves.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT, int AHEAD>
__device__ __forceinline__ void in_a_tree(C (&total)[COUNT], const Chain& chain, const Fold& fold,
                                          const Draw& draw) {
  constexpr int LEAF = AHEAD == 8 ? 3 : 0;
  DYNAMIC_SHARED(C, stack);
#pragma unroll 1
  for (int first = 0;; first += AHEAD) {
    if constexpr (AHEAD == 8) {
      subtree<S, C, STEP, DRAWN, SUMS>(total, chain, first, fold, draw);
    } else {
      decode<S>(read<S, COUNT>(chain, first), total);
    }
    const bool last = first + AHEAD >= chain.count;
    int index = first / AHEAD, level = LEAF;
    C* slot = stack + threadIdx.x;
#pragma unroll 1
    while (last ? index : index & 1) {
      if (index & 1) {
        C left[COUNT];
#pragma unroll
        for (int element = 0; element < COUNT; ++element) left[element] = slot[element * blockDim.x];
        combine<S, C, SUMS>(left, total, fold.op);
        round_step<C, STEP, DRAWN>(left, fold.accumulator, draw,
                                   tree_step(fold, level, index >> 1));
#pragma unroll
        for (int element = 0; element < COUNT; ++element) total[element] = left[element];
      }
      index >>= 1;
      ++level;
      slot += COUNT * blockDim.x;
    }
    if (last) return;
#pragma unroll
    for (int element = 0; element < COUNT; ++element) slot[element * blockDim.x] = total[element];
  }
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

// The member at which a block's chain starts.
__device__ __forceinline__ int ring_start(const Fold& fold, int block) {
  if (fold.ring != LISTED_RING) return block;
  return static_cast<int>(__ldg(reinterpret_cast<const i64*>(fold.starts) + block));
}

template <class S, class C, int STEP, bool DRAWN, int ORDER, bool SUMS, int COUNT, int AHEAD>
__device__ __forceinline__ void reduce(C (&total)[COUNT], const Chain& chain, const Fold& fold,
                                       int start, const Draw& draw) {
  if constexpr (ORDER == TREE) {
    if (fold.graph) {
      by_graph<S, C, STEP, DRAWN, SUMS, COUNT>(total, chain, fold, draw);
      return;
    }
    in_a_tree<S, C, STEP, DRAWN, SUMS, COUNT, AHEAD>(total, chain, fold, draw);
  } else {
    in_sequence<S, C, STEP, DRAWN, SUMS, COUNT, AHEAD>(total, chain, start, fold, draw);
  }
}

template <class S, class C, int STEP, bool DRAWN, int ORDER, bool SUMS, int COUNT, int AHEAD>
__global__ void __launch_bounds__(256, 1) fold(const Fold fold) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const Chunk chunk = chunk_of<COUNT>(fold.layout, thread);
  if (chunk.from >= chunk.to) return;
  Chain chain = {members_of(fold.layout), fold.layout.stride, chunk.offset, chunk.out_offset,
               static_cast<int>(fold.layout.members), chunk.from, chunk.to, false};
  const int width = access_width(S::BYTES * COUNT);
  chain.whole = chunk.from == 0 && chunk.to == COUNT && fold.layout.alike &&
               (COUNT == 1 || fold.layout.stride == S::BYTES) &&
               (reinterpret_cast<u64>(chain.members.at(0, chain.offset)) & (width - 1)) == 0;
  const bool ring = ORDER == SEQUENCE && fold.ring != NO_RING;
  int block = ring ? ring_block(fold, chunk.index + chunk.from) : 0;
  int start = ring ? ring_start(fold, block) : 0;
  const bool one_chain = !ring || ring_block(fold, chunk.index + chunk.to - 1) == block;
  C total[COUNT];
  if constexpr (DRAWN) {
    Draw draw = draw_of(fold.finish, chunk);
    // A chain for each block of a ring that the chunk touches; the others' elements are not stored.
    for (int from = chunk.from; from < chunk.to; from = chain.to) {
      chain.from = from;
      chain.to = chunk.to;
      if (!one_chain) {
        block = ring_block(fold, chunk.index + from);
        start = ring_start(fold, block);
        chain.to = from + 1;
        while (chain.to < chunk.to && ring_block(fold, chunk.index + chain.to) == block) ++chain.to;
        chain.whole = false;
      }
      reduce<S, C, STEP, DRAWN, ORDER, SUMS, COUNT, AHEAD>(total, chain, fold, start, draw);
      finish_chunk(total, fold.finish, chunk, fold.layout.out, chain.from, chain.to);
    }
  } else {
    const Draw draw = {};
    if (COUNT == 1 || (chain.whole && one_chain)) {
      reduce<S, C, STEP, DRAWN, ORDER, SUMS, COUNT, AHEAD>(total, chain, fold, start, draw);
    } else {
      // At the edges of rows and of a ring's blocks: element by element, complex ones whole.
      constexpr int EACH = SUMS || !IsFloat<C>::value || COUNT == 1 ? 1 : 2;
      constexpr int EDGE_AHEAD = AHEAD == 1 ? 1 : ORDER == TREE ? 8 : 4;
      const int parts = EACH == 1 ? 1 : static_cast<int>(fold.parts);
      chain.from = 0;
      chain.to = parts;
      chain.whole = false;
#pragma unroll 1
      for (int element = 0; element < COUNT; element += parts) {
        C one[EACH];
        one[0] = 0;
        if constexpr (EACH == 2) one[1] = 0;
        if (chunk.from <= element && element < chunk.to) {
          if (ring) start = ring_start(fold, ring_block(fold, chunk.index + element));
          chain.offset = chunk.offset + element * chain.stride;
          chain.place = chunk.out_offset + element;
          reduce<S, C, STEP, DRAWN, ORDER, SUMS, EACH, EDGE_AHEAD>(one, chain, fold, start, draw);
        }
        turn(total, one[0]);
        if constexpr (EACH == 2) {
          if (parts == 2) turn(total, one[1]);
        }
      }
    }
    finish_chunk(total, fold.finish, chunk, fold.layout.out, chunk.from, chunk.to);
  }
}
