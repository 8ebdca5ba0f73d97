// fold: each thread reduces a chunk of consecutive elements over all members, in registers.
// Inputs are read once, 16 bytes at a time and eight members ahead; where elements are few, 4 bytes
// at a time and many more members ahead. Threads share nothing.
#include "fold.cuh"
#include "members.cuh"

// Two float16 in a word, which are added at once. Sums of two float16, rounded to float16, have the
// same bits by way of float32: its 24 bits of significand are at least 2 * 11 + 2.
struct Halves {
  u32 word;
};
template <class C>
constexpr int LANES = 1;  // elements in a value of the computing type
template <>
constexpr int LANES<Halves> = 2;

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

template <class S, class C, bool SUMS, int COUNT>
__device__ __forceinline__ void combine(Halves (&left)[COUNT], const Halves (&right)[COUNT], i64) {
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    left[index].word = add_halves(left[index].word, right[index].word);
  }
}

// Stochastically to float16 or bfloat16, in the last bits alone: for float16, values have to be
// multiples of its smallest number, so that those below its normal ones have no bits to drop.
template <int STEP, int COUNT>
__device__ __forceinline__ void draw_last_bits(float (&values)[COUNT], const Block& block) {
  float drawn[COUNT], sum = 0;
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    const u32 bits = __float_as_uint(values[index]), lane = block.lane(index);
    drawn[index] = __uint_as_float(draw_bits<STEP == FLOAT16 ? 13 : 16>(bits, lane));
    sum = sum + values[index];
  }
  if (sum != sum) {  // one of them may be NaN
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      if (values[index] != values[index]) drawn[index] = values[index];
    }
  }
#pragma unroll
  for (int index = 0; index < COUNT; index += 2) {
    if constexpr (STEP == FLOAT16) {  // beyond the largest number is infinity
      const u32 word = halves_of_floats(drawn[index], drawn[index + 1]);
      drawn[index] = float_of_half(static_cast<u16>(word));
      drawn[index + 1] = float_of_half(static_cast<u16>(word >> 16));
    }
    values[index] = drawn[index];
    values[index + 1] = drawn[index + 1];
  }
}

// The rounding after one operation, step `step` of the order's enumeration. Sums of members that
// float16 holds are multiples of its smallest number.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT>
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
  } else if constexpr (DRAWN && (STEP == BFLOAT16 || (SUMS && is_in_float16<S>()))) {
    draw_last_bits<STEP>(values, block);
  } else {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      float value = static_cast<float>(values[index]);
      if constexpr (DRAWN) {
        u32 lane = block.lane(index);
        value = draw_float16(value, lane);
      } else {
        value = STEP == FLOAT16 ? float_of_half(half_of_float(value)) : round_bfloat16(value);
      }
      values[index] = value;
    }
  }
}

template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT>
__device__ __forceinline__ void round_step(Halves (&)[COUNT], const Target&, const Draw&, u64) {}

template <class S, class C, int COUNT>
__device__ __forceinline__ void decode(const Raw<S::BYTES, COUNT>& raw, C (&values)[COUNT]) {
  if constexpr (reads_halves<S>() && S::BYTES == 1 && COUNT % 2 == 0) {
#pragma unroll
    for (int index = 0; index < COUNT; index += 2) {
      const u32 word = halves_of(S(), raw, index);
      values[index] = static_cast<C>(float_of_half(static_cast<u16>(word)));
      values[index + 1] = static_cast<C>(float_of_half(static_cast<u16>(word >> 16)));
    }
  } else {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      values[index] = static_cast<C>(value_of(S(), raw.code(index)));
    }
  }
}

template <class S, int COUNT>
__device__ __forceinline__ void decode(const Raw<S::BYTES, 2 * COUNT>& raw,
                                       Halves (&values)[COUNT]) {
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    if constexpr (reads_halves<S>()) {
      values[index].word = halves_of(S(), raw, 2 * index);
    } else {
      values[index].word = halves_of_floats(value_of(S(), raw.code(2 * index)),
                                            value_of(S(), raw.code(2 * index + 1)));
    }
  }
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

template <class S, class C, int COUNT>
__device__ __forceinline__ void take_partial(Halves (&total)[COUNT], const Fold& fold, i64 place,
                                             int from, int to) {
  float values[2 * COUNT];
  take_partial<S, float>(values, fold, place, from, to);
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {  // exact: float16 holds all such partial results
    total[index].word = halves_of_floats(values[2 * index], values[2 * index + 1]);
  }
}

// Add `rest` members (at most AHEAD), which have been read, to the `seen` before them. The very
// first member is the total, unless a partial result came before it.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT, int AHEAD>
__device__ __forceinline__ void add_batch(C (&total)[COUNT],
                                          const Raw<S::BYTES, COUNT * LANES<C>> (&raw)[AHEAD],
                                          int rest, int seen, const Fold& fold, const Draw& draw) {
#pragma unroll
  for (int ahead = 0; ahead < AHEAD; ++ahead) {
    if (ahead >= rest) continue;
    C next[COUNT];
    decode<S>(raw[ahead], next);
    if (ahead == 0 && seen == 0 && !fold.before) {
#pragma unroll
      for (int index = 0; index < COUNT; ++index) total[index] = next[index];
      continue;
    }
    combine<S, C, SUMS>(total, next, fold.op);
    round_step<S, C, STEP, DRAWN, SUMS>(total, fold.accumulator, draw, fold.before + seen + ahead);
  }
}

// Members start, start + 1, ... and around, one after the other. AHEAD of them are loaded before the
// first is added, and as many as there are in the last batch; if AHEAD is one, a member is loaded
// while the one before it is added.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT, int AHEAD>
__device__ __forceinline__ void in_sequence(C (&total)[COUNT], const Chain& chain, int start,
                                            const Fold& fold, const Draw& draw) {
  constexpr int ELEMENTS = COUNT * LANES<C>;
  const int count = chain.count;
  if (fold.before) take_partial<S, C>(total, fold, chain.place, chain.from, chain.to);
  if constexpr (AHEAD > 1) {
    Raw<S::BYTES, ELEMENTS> raw[AHEAD];
    int seen = 0;
#pragma unroll 1
    for (; seen + AHEAD <= count; seen += AHEAD) {
      read_batch<S>(raw, chain, around(start + seen, count), AHEAD);
      add_batch<S, C, STEP, DRAWN, SUMS>(total, raw, AHEAD, seen, fold, draw);
    }
    const int rest = count - seen;
    if (rest == 0) return;
    read_batch<S>(raw, chain, around(start + seen, count), rest);
    add_batch<S, C, STEP, DRAWN, SUMS>(total, raw, rest, seen, fold, draw);
  } else {
    int member = start, seen = 0;
    if (!fold.before) {  // here, not in the loop, which would move all totals around
      decode<S>(read<S, ELEMENTS>(chain, member), total);
      member = around(member + 1, count);
      ++seen;
    }
    if (seen == count) return;
    Raw<S::BYTES, ELEMENTS> coming = read<S, ELEMENTS>(chain, member);
#pragma unroll 1
    while (true) {
      C next[COUNT];
      decode<S>(coming, next);
      member = around(member + 1, count);
      const bool last = seen + 1 == count;
      if (!last) coming = read<S, ELEMENTS>(chain, member);
      combine<S, C, SUMS>(total, next, fold.op);
      round_step<S, C, STEP, DRAWN, SUMS>(total, fold.accumulator, draw, fold.before + seen);
      if (last) return;
      ++seen;
    }
  }
}

// in_stages: threads of a block, stages of its buffer in shared memory, and members in a batch.
const int STAGE_THREADS = 32, STAGES = 3, STAGE_BATCH = 16;

template <int BYTES>
struct Word {
  typedef u32 type;
};
template <>
struct Word<8> {
  typedef uint2 type;
};

// Addresses of members one after the other, in one array or in a list.
struct Stacked {
  const char* at;
  i64 stride;

  template <int COUNT>
  __device__ __forceinline__ void next(const char* (&from)[COUNT]) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) from[index] = at + index * stride;
    at += COUNT * stride;
  }
};

struct Listed {
  const u64* at;
  i64 offset;

  template <int COUNT>
  __device__ __forceinline__ void next(const char* (&from)[COUNT]) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      from[index] = reinterpret_cast<const char*>(__ldg(at + index)) + offset;
    }
    at += COUNT;
  }
};

// Copy `run` members to a stage: neighbours are STAGE_THREADS apart. Eight addresses at a time do not
// wait for one another.
template <int BYTES, class Addresses>
__device__ __forceinline__ void copy_run(typename Word<BYTES>::type* to, int run, Addresses addresses) {
  int index = 0;
#pragma unroll 1
  for (; index + 8 <= run; index += 8) {
    const char* from[8];
    addresses.next(from);
#pragma unroll
    for (int next = 0; next < 8; ++next) {
      copy_async<BYTES>(to + (index + next) * STAGE_THREADS, from[next]);
    }
  }
#pragma unroll 1
  for (; index < run; ++index) {
    const char* from[1];
    addresses.next(from);
    copy_async<BYTES>(to + index * STAGE_THREADS, from[0]);
  }
}

// The members that come, from the chain's start and around.
struct Coming {
  const Chain& chain;
  int member, left;

  // Whether a batch is left whose members lie one after the other in one array.
  __device__ __forceinline__ bool has_run() const {
    return !chain.members.table && STAGE_BATCH <= left && STAGE_BATCH <= chain.count - member;
  }

  // Copy such a batch.
  template <int BYTES>
  __device__ __forceinline__ void copy_batch(typename Word<BYTES>::type* to) {
    Stacked addresses = {chain.members.at(member, chain.offset), chain.members.stride};
#pragma unroll
    for (int index = 0; index < STAGE_BATCH; ++index) {
      const char* from[1];
      addresses.next(from);
      copy_async<BYTES>(to + index * STAGE_THREADS, from[0]);
    }
    left -= STAGE_BATCH;
    member = around(member + STAGE_BATCH, chain.count);
  }

  // Copy the next `most` members, or as many as are left.
  template <int BYTES>
  __device__ __forceinline__ void copy(typename Word<BYTES>::type* to, int most) {
    const Members& members = chain.members;
    most = most < left ? most : left;
    left -= most;
    while (most) {  // twice at most: up to the last member, and from the first
      const int run = most < chain.count - member ? most : chain.count - member;
      if (members.table) {
        copy_run<BYTES>(to, run, Listed{members.table + member, chain.offset});
      } else {
        copy_run<BYTES>(to, run, Stacked{members.at(member, chain.offset), members.stride});
      }
      to += run * STAGE_THREADS;
      most -= run;
      member = around(member + run, chain.count);
    }
  }
};

// As in_sequence, where elements are few: a multiprocessor has few threads then, and each has to
// have many members under way. Stages of them are copied to shared memory, which takes no registers,
// while those of earlier stages are added. Each thread reads only what it copied: no barrier.
template <class S, class C, int STEP, bool SUMS, int COUNT>
__device__ __forceinline__ void in_stages(C (&total)[COUNT], const Chain& chain, int start,
                                          const Fold& fold) {
  constexpr int ELEMENTS = COUNT * LANES<C>, BYTES = S::BYTES * ELEMENTS;
  typedef typename Word<BYTES>::type Unit;
  DYNAMIC_SHARED(Unit, stages);
  const int members = STAGE_BATCH * static_cast<int>(fold.batches);  // of a stage
  Unit* const column = stages + threadIdx.x;
  Coming coming = {chain, start, chain.count};
  if (fold.before) take_partial<S, C>(total, fold, chain.place, chain.from, chain.to);
#pragma unroll 1
  for (int stage = 0; stage + 1 < STAGES; ++stage) {
    coming.copy<BYTES>(column + stage * members * STAGE_THREADS, members);
    commit_copies();  // an empty group, too, where none is left
  }
  int stage = 0, empty = STAGES - 1;
#pragma unroll 1
  for (int seen = 0; seen < chain.count;) {
    wait_for_copies<STAGES - 2>();
    const Unit* at = column + stage * members * STAGE_THREADS;
    Unit* to = column + empty * members * STAGE_THREADS;
#pragma unroll 1
    for (int batch = 0; batch < fold.batches && seen < chain.count; ++batch) {
      Raw<S::BYTES, ELEMENTS> raw[STAGE_BATCH];
#pragma unroll
      for (int ahead = 0; ahead < STAGE_BATCH; ++ahead) {
        const Unit unit = at[ahead * STAGE_THREADS];
        if constexpr (BYTES == 8) {
          raw[ahead].words[0] = unit.x;
          raw[ahead].words[1] = unit.y;
        } else {
          raw[ahead].words[0] = unit;
        }
      }
      const int rest = chain.count - seen < STAGE_BATCH ? chain.count - seen : STAGE_BATCH;
      if (rest == STAGE_BATCH && coming.has_run()) {
        // In one block of code: additions wait for one another, and addresses, but not for each other.
        coming.copy_batch<BYTES>(to);
        add_batch<S, C, STEP, false, SUMS>(total, raw, STAGE_BATCH, seen, fold, Draw{});
      } else {
        coming.copy<BYTES>(to, STAGE_BATCH);
        add_batch<S, C, STEP, false, SUMS>(total, raw, rest, seen, fold, Draw{});
      }
      seen += rest;
      at += STAGE_BATCH * STAGE_THREADS;
      to += STAGE_BATCH * STAGE_THREADS;
    }
    commit_copies();
    empty = stage;
    stage = stage + 1 < STAGES ? stage + 1 : 0;
  }
}

// Eight members (or as many as there are) become one subtree, in registers.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT>
__device__ __forceinline__ void subtree(C (&total)[COUNT], const Chain& chain, int first,
                                        const Fold& fold, const Draw& draw) {
  constexpr int ELEMENTS = COUNT * LANES<C>;
  const int here = chain.count - first < 8 ? chain.count - first : 8;
  Raw<S::BYTES, ELEMENTS> raw[8];
  read_batch<S>(raw, chain, first, here);
  C nodes[4][COUNT], right[COUNT];
#pragma unroll
  for (int node = 0; node < 4; ++node) {
    if (2 * node >= here) continue;
    decode<S>(raw[2 * node], nodes[node]);
    if (2 * node + 1 >= here) continue;
    decode<S>(raw[2 * node + 1], right);
    combine<S, C, SUMS>(nodes[node], right, fold.op);
    round_step<S, C, STEP, DRAWN, SUMS>(nodes[node], fold.accumulator, draw,
                               tree_step(fold, chain.node, 0, first / 2 + node));
  }
#pragma unroll
  for (int level = 1; level < 3; ++level) {  // node k of a level is kept in nodes[k << level]
#pragma unroll
    for (int node = 0; node < 4; node += 1 << level) {
      const int other = node + (1 << (level - 1));
      if (2 * other >= here) continue;
      combine<S, C, SUMS>(nodes[node], nodes[other], fold.op);
      round_step<S, C, STEP, DRAWN, SUMS>(nodes[node], fold.accumulator, draw,
                                 tree_step(fold, chain.node, level, (first / 2 + node) >> level));
    }
  }
#pragma unroll
  for (int element = 0; element < COUNT; ++element) total[element] = nodes[0][element];
}

// The additions of any graph, from instruction `first` on, by a machine with a stack in shared
// memory, as in in_a_tree; its last value is `total`.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT>
__device__ __forceinline__ void by_graph(C (&total)[COUNT], const Chain& chain, const Fold& fold,
                                         int first, const Draw& draw) {
  DYNAMIC_SHARED(C, stack);
  const i64* graph = reinterpret_cast<const i64*>(fold.graph) + first;
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
      decode<S>(read<S, COUNT * LANES<C>>(chain, static_cast<int>(instruction)), total);
    } else {
      C left[COUNT];
      slot -= COUNT * blockDim.x;
#pragma unroll
      for (int element = 0; element < COUNT; ++element) left[element] = slot[element * blockDim.x];
      combine<S, C, SUMS>(left, total, fold.op);
      round_step<S, C, STEP, DRAWN, SUMS>(left, fold.accumulator, draw,
                                          static_cast<u64>(-instruction));
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
      decode<S>(read<S, COUNT * LANES<C>>(chain, first), total);
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
        round_step<S, C, STEP, DRAWN, SUMS>(left, fold.accumulator, draw,
                                   tree_step(fold, chain.node, level, index >> 1));
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

// Whether one of a ring's chains holds all of a chunk, whose first element is in `block`. Blocks
// of a sliced ring come again, so that a chunk may begin and end in one with others between.
__device__ __forceinline__ bool is_one_chain(const Fold& fold, const Chunk& chunk, int block) {
  if (fold.ring == SLICED_RING && chunk.to - chunk.from > fold.slice * fold.parts) return false;
  return ring_block(fold, chunk.index + chunk.to - 1) == block;
}

// Whether a chunk is added as pairs of float16: all members and partial results are of that format.
template <class S, class C, int STEP, bool DRAWN, bool SUMS, int COUNT>
constexpr __device__ bool packs() {
  return SUMS && STEP == FLOAT16 && !DRAWN && LANES<C> == 1 && COUNT % 2 == 0 && is_in_float16<S>();
}

template <class S, class C, int STEP, bool DRAWN, int ORDER, bool SUMS, int COUNT, int AHEAD>
__device__ __forceinline__ void reduce(C (&total)[COUNT], const Chain& chain, const Fold& fold,
                                       int start, const Draw& draw) {
  if constexpr (packs<S, C, STEP, DRAWN, SUMS, COUNT>()) {
    Halves halves[COUNT / 2];
    reduce<S, Halves, STEP, DRAWN, ORDER, SUMS, COUNT / 2, AHEAD>(halves, chain, fold, start, draw);
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      total[index] = float_of_half(static_cast<u16>(halves[index / 2].word >> (16 * (index % 2))));
    }
  } else if constexpr (ORDER == TREE) {
    if (fold.graph) {
      by_graph<S, C, STEP, DRAWN, SUMS, COUNT>(total, chain, fold, start, draw);
      return;
    }
    in_a_tree<S, C, STEP, DRAWN, SUMS, COUNT, AHEAD>(total, chain, fold, draw);
  } else {
    if constexpr (AHEAD == STAGE_BATCH) {
      if (chain.whole) {
        in_stages<S, C, STEP, SUMS, COUNT>(total, chain, start, fold);
        return;
      }
    }
    constexpr int LOADS = AHEAD == STAGE_BATCH ? STAGE_BATCH / (COUNT * LANES<C>) : AHEAD;
    in_sequence<S, C, STEP, DRAWN, SUMS, COUNT, LOADS>(total, chain, start, fold, draw);
  }
}

// Blocks of 256 threads that a multiprocessor has to hold: three leave each thread 80 registers, two
// 128. Doubles, long chunks, trees and other operators than sums need more.
template <class S, class C, int STEP, bool DRAWN, int ORDER, bool SUMS, int COUNT, int AHEAD>
constexpr __device__ int blocks() {
  if (AHEAD == STAGE_BATCH) return 20;  // of STAGE_THREADS
  const int length = packs<S, C, STEP, DRAWN, SUMS, COUNT>() ? COUNT / 2 : COUNT;
  if (sizeof(C) == 8) return ORDER == TREE && length >= 8 ? 1 : 2;
#if __CUDA_ARCH__ >= 1000
  if (DRAWN) return 2;
#endif
  if (length >= 16) return 1;
  if (ORDER == TREE) return length >= 8 || !SUMS ? 2 : 3;
  return length >= 8 && !SUMS ? 2 : 3;
}

template <class S, class C, int STEP, bool DRAWN, int ORDER, bool SUMS, int COUNT, int AHEAD>
__global__ void __launch_bounds__(
    AHEAD == STAGE_BATCH ? STAGE_THREADS : 256,
    (blocks<S, C, STEP, DRAWN, ORDER, SUMS, COUNT, AHEAD>()))
    fold(const Fold fold) {
  const Share share = share_of(fold.layout, fold.share, fold.share_blocks);
  Chunk chunk = chunk_of<COUNT>(fold.layout, share.thread);
  if (chunk.from >= chunk.to) return;
  Chain chain = {members_of(fold.layout).from(share.first), fold.layout.stride, chunk.offset,
                 chunk.out_offset, fold.node + share.first, share.count, chunk.from, chunk.to, false};
  chunk.out_offset += share.out_offset;
  const int width = access_width(S::BYTES * COUNT);
  chain.whole = chunk.from == 0 && chunk.to == COUNT && fold.layout.alike >= width &&
                (COUNT == 1 || fold.layout.stride == S::BYTES) &&
                (reinterpret_cast<u64>(chain.members.at(0, chain.offset)) & (width - 1)) == 0;
  const bool ring = fold.ring != NO_RING;
  int block = ring ? ring_block(fold, chunk.index + chunk.from) : 0;
  int start = ring ? ring_start(fold, block) : 0;
  const bool one_chain = !ring || is_one_chain(fold, chunk, block);
  C total[COUNT];
  if constexpr (DRAWN || AHEAD == STAGE_BATCH) {
    Draw draw = {};
    if constexpr (DRAWN) draw = draw_of(fold.finish, chunk);
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
      constexpr int EDGE_AHEAD = AHEAD == 1 ? 1 : 8;
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
