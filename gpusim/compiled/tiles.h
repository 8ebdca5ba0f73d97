// The kernels on a CPU: fold.cu's sums and products, and round.cu, over the same arguments.
// A tile of a row is folded over all members before the next: its total stays in the nearest cache,
// and each member is read once. All loops over a tile's elements are without branches, for vectors.
#pragma once

#include "reading.h"
#include "results.h"
#include "sent.h"

// Members that are read side by side: they come faster than one after the other, as each begins a
// page, in which the processor's prefetching begins anew. Arithmetic on more is not in registers.
template <class S>
constexpr int ROWS = S::BYTES == 1 ? 4 : 8;
template <int N>
struct Count {
  static constexpr int value = N;
};

// The fold of one tile over all members. DRAWN is of the rounding to the wire where one SENDS, and
// else of that to the accumulator.
template <class S, class C, int STEP, bool DRAWN, int SENDS = NOTHING, int WIRE = EXACT>
struct Job {
  const Fold& fold;
  const Rounder& rounder;  // to the accumulator
  const Tile& tile;
  u32* buffer;  // of random numbers
  const Sending* sending = nullptr;
  const Members members = members_of(fold.layout);
  static constexpr bool SUM_DRAWN = DRAWN && SENDS == NOTHING;

  const char* at(int member) const { return members.at(member, tile.offset); }

  // Fetch the member after this one: the processor's own prefetching, which begins anew at each
  // tile, comes too late.
  inline void fetch_next(int member) const {
    const int bytes = tile.count * S::BYTES;
    const char* next = member + 1 < fold.layout.members ? at(member + 1) : at(0) + bytes;
    for (int k = 0; k < bytes; k += 64) __builtin_prefetch(next + k);
  }

  // Calls function(what arrives, as HELD has it, of an operand that is sent with this step).
  template <int HELD = STEP, class Operand, class Function>
  inline void send(Operand operand, u64 step, Function function) const {
    const Rounder& wire = sending->wire;
    const int count = tile.count;
    const u32* lanes = DRAWN ? draw(buffer, fold.finish, tile, step, 1) : buffer;
    if constexpr (WIRE == TARGET) {
      if (!wire.in_loops<DRAWN>()) {
        alignas(64) C values[TILE];
        FOR_EACH(k, count) values[k] = static_cast<C>(operand[k]);
        round_all<C, DRAWN>(values, count, wire, lanes);
        FOR_EACH(k, count) values[k] = held<HELD>(values[k]);
        return function(Values<C>{values});
      }
    }
    function(Arriving<HELD, WIRE, DRAWN, Operand>{operand, {wire.vector}, lanes});
  }
  u64 step_of_member(int member) const {
    const int last = static_cast<int>(fold.layout.members) - 1;
    return fold.layout.members + 1 + (sending->turned ? last - member : member);
  }

  // left op right, rounded, as step `step`. `out` may be either.
  template <class Left, class Right>
  inline void combine(Left left, Right right, C* out, u64 step) const {
    if constexpr (SENDS == LEFT) {
      send(left, step, [&](auto sent) { join(sent, right, out, step); });
    } else if constexpr (SENDS == RIGHT) {
      send(right, step, [&](auto sent) { join(left, sent, out, step); });
    } else {
      join(left, right, out, step);
    }
  }
  template <class Left, class Right>
  inline void join(Left left, Right right, C* out, u64 step) const {
    const int count = tile.count;
    const u32* lanes = SUM_DRAWN ? draw(buffer, fold.finish, tile, step) : buffer;
    if (SENDS != NOTHING || fold.op == SUM) {
      FOR_EACH(k, count) {
        const C value = static_cast<C>(left[k] + right[k]);
        out[k] = rounded<STEP, SUM_DRAWN>(value, SUM_DRAWN ? lanes[k] : 0);
      }
    } else {
      FOR_EACH(k, count) {
        const C value = static_cast<C>(left[k] * right[k]);
        out[k] = rounded<STEP, SUM_DRAWN>(value, SUM_DRAWN ? lanes[k] : 0);
      }
    }
    if constexpr (STEP == TARGET) round_all<C, SUM_DRAWN>(out, count, rounder, lanes);
  }

  Codes<S, C> codes_of(int member) const {
    return {reinterpret_cast<const typename Code<S::BYTES>::type*>(at(member))};
  }

  // The same with a member at the right.
  inline void combine_member(const C* values, int member, C* out, u64 step) const {
    const Values<C> left = {values};
    if (fold.layout.stride == S::BYTES) {
      fetch_next(member);
      const Codes<S, C> codes = codes_of(member);
      if constexpr (SENDS == MEMBERS) {
        send(codes, step_of_member(member), [&](auto sent) { combine(left, sent, out, step); });
      } else {
        combine(left, codes, out, step);
      }
    } else {
      alignas(64) C right[TILE];
      load_member(right, member);
      combine(left, Values<C>{right}, out, step);
    }
  }

  // The member that comes as the `number`th from this one on, and around.
  inline int member(int start, int number) const {
    const int members = static_cast<int>(fold.layout.members);
    return start + number < members ? start + number : start + number - members;
  }

  // Calls function(Count, member, whether it is the fold's first) for all members from this one on,
  // some at a time.
  template <class Function>
  inline void in_groups(int start, Function function) const {
    const int members = static_cast<int>(fold.layout.members);
    for (int seen = 0; seen < members;) {
      const int next = member(start, seen), left = members - seen;
      const bool first = !seen && !fold.before;
      if (left >= ROWS<S>) {
        function(Count<ROWS<S>>(), next, first);
        seen += ROWS<S>;
      } else if (left >= 4) {
        function(Count<4>(), next, first);
        seen += 4;
      } else {
        function(Count<1>(), next, first);
        ++seen;
      }
    }
  }

  // total op COUNT members from this one on, to nearest; in place of `total` if it is the FIRST.
  template <int COUNT, bool FIRST>
  inline void combine_rows(C* total, int start) const {
    typedef typename Code<S::BYTES>::type T;
    typedef ToFormat<SENDS == NOTHING ? EXACT : WIRE, false> Wire;
    const int count = tile.count;
    const Wire wire = {sending ? sending->wire.vector : Vector{}};
    Arriving<STEP, SENDS == MEMBERS ? WIRE : EXACT, false, Codes<S, C>> rows[COUNT];
    for (int n = 0; n < COUNT; ++n) rows[n] = {codes_of(member(start, n)), {wire.vector}, nullptr};
    const auto left = [wire](C value) {
      return SENDS == LEFT ? held<STEP>(wire(value, 0)) : value;
    };
    if (SENDS != NOTHING || fold.op == SUM) {
      FOR_EACH(k, count) {
        C value = FIRST ? static_cast<C>(rows[0][k]) : total[k];
#pragma unroll
        for (int n = FIRST; n < COUNT; ++n) {
          value = rounded<STEP, false>(static_cast<C>(left(value) + rows[n][k]), 0);
        }
        total[k] = value;
      }
    } else {
      FOR_EACH(k, count) {
        C value = FIRST ? static_cast<C>(rows[0][k]) : total[k];
#pragma unroll
        for (int n = FIRST; n < COUNT; ++n) {
          value = rounded<STEP, false>(static_cast<C>(value * rows[n][k]), 0);
        }
        total[k] = value;
      }
    }
  }

  // total + COUNT members from this one on, scaled; whether all is below float16's end.
  template <int COUNT, bool FIRST>
  inline bool add_scaled(float* total, int start) const {
    typedef typename Code<S::BYTES>::type T;
    const int count = tile.count;
    const T* rows[COUNT];
    for (int n = 0; n < COUNT; ++n) rows[n] = reinterpret_cast<const T*>(at(member(start, n)));
    u32 bits = 0;
    u8 doubt = 0;
    FOR_EACH(k, count) {
      float sum = FIRST ? Scaled<S>::of(rows[0][k]) * Scaled<S>::FACTOR : total[k];
      if (FIRST) {
        bits |= __float_as_uint(sum);
        doubt |= Scaled<S>::doubt(rows[0][k]);
      }
#pragma unroll
      for (int n = FIRST; n < COUNT; ++n) {
        sum = __builtin_fmaf(Scaled<S>::of(rows[n][k]), Scaled<S>::FACTOR, sum);
        sum = __builtin_fmaf(sum, 8192, -__builtin_fmaf(sum, 8192, -sum));
        bits |= __float_as_uint(sum);
        doubt |= Scaled<S>::doubt(rows[n][k]);
      }
      total[k] = sum;
    }
    return !(bits & 0x40000000u) && !(doubt & 0x80);
  }

  // `in_sequence` for sums, in float32. False where these are not float16's.
  bool sum_scaled(float* total, int start) const {
    const int count = tile.count;
    if (fold.op != SUM || fold.before || fold.layout.stride != S::BYTES) return false;
    bool below = true;
    in_groups(start, [this, total, &below](auto members, int next, bool first) {
      const int some = members.value;
      below &= first ? add_scaled<some, true>(total, next) : add_scaled<some, false>(total, next);
    });
    FOR_EACH(k, count) total[k] *= 0x1p15f;
    return below;
  }

  void load_member(C* values, int member) const {
    const int count = tile.count;
    if (fold.layout.stride == S::BYTES) fetch_next(member);
    load<S>(values, at(member), fold.layout.stride, count);
    if constexpr (SENDS == MEMBERS) {
      send(Values<C>{values}, step_of_member(member), [values, count](auto sent) {
        FOR_EACH(k, count) values[k] = sent[k];
      });
    }
  }

  void load_partial(C* total) const {
    if constexpr (sizeof(C) == 8) {
      load_partial<8>(total);
    } else {
      if (fold.stored_bytes == 4) load_partial<4>(total);
      if (fold.stored_bytes == 2) load_partial<2>(total);
      if constexpr (S::BYTES == 1) {
        if (fold.stored_bytes == 1) load_partial<1>(total);
      }
    }
  }
  template <int BYTES>
  void load_partial(C* total) const {
    const char* at = reinterpret_cast<const char*>(fold.partial) + tile.place * BYTES;
    const int count = tile.count;
    FOR_EACH(k, count) {
      typedef typename Choose<sizeof(C) == 8, double, float>::type Float;
      const u64 code = load_element<BYTES>(at + k * BYTES);
      total[k] = static_cast<C>(value_of_partial<S, Float, BYTES>(code, fold));
    }
  }

  // Members start, start + 1, ... and around, one after the other.
  void in_sequence(C* total, int start) const {
    if (fold.before) load_partial(total);
    if constexpr (!DRAWN && STEP != TARGET) {
      const bool in_loops = WIRE != TARGET || sending->wire.in_loops<DRAWN>();
      if (in_loops && fold.layout.stride == S::BYTES) {
        in_groups(start, [this, total](auto members, int next, bool first) {
          const int some = members.value;
          first ? combine_rows<some, true>(total, next) : combine_rows<some, false>(total, next);
        });
        return;
      }
    }
    if (!fold.before) load_member(total, start);
    for (i64 seen = !fold.before; seen < fold.layout.members; ++seen) {
      combine_member(total, member(start, seen), total, fold.before + seen);
    }
  }

  // Neighbours in pairs, level by level. Slot k holds a subtree of 2**k members, like a binary
  // counter; the carries of a member end in the slot of the last one.
  void in_a_tree(C* total, C* slots) const {
    const int count = static_cast<int>(fold.layout.members);
    const bool pairs = SENDS != MEMBERS && fold.layout.stride == S::BYTES;  // read side by side
    for (int member = 0; member < count; ++member) {
      const bool last = member + 1 == count;
      const int carries = last ? 64 : __builtin_ctz(~static_cast<u32>(member));
      const C* right = nullptr;  // none: the member itself
      int level = 0;
      for (int index = member; last ? index : index & 1; index >>= 1, ++level) {
        if (!(index & 1)) continue;  // an odd one out goes up
        const C* left = slots + static_cast<i64>(level) * TILE;
        C* to = level + 1 == carries ? slots + static_cast<i64>(carries) * TILE : total;
        const u64 step = tree_step(fold, fold.node, level, index >> 1);
        if (right) {
          combine(Values<C>{left}, Values<C>{right}, to, step);
        } else if (pairs && !level) {
          combine(codes_of(member - 1), codes_of(member), to, step);
        } else {
          combine_member(left, member, to, step);
        }
        right = to;
      }
      if (!right && (last || !pairs)) load_member(last ? total : slots, member);
    }
  }

  // The additions of any graph, by a machine with a stack, from instruction `first` on.
  void by_graph(C* total, C* stack, int first) const {
    const i64* graph = reinterpret_cast<const i64*>(fold.graph) + first;
    C* top = stack;
    for (i64 next = 0; next < fold.instructions; ++next) {
      const i64 instruction = graph[next];
      if (instruction >= 0) {
        load_member(top, static_cast<int>(instruction));
        top += TILE;
      } else {
        top -= TILE;
        C* left = top - TILE;
        combine(Values<C>{left}, Values<C>{top}, left, static_cast<u64>(-instruction));
      }
    }
    FOR_EACH(k, tile.count) total[k] = stack[k];
  }

  void run(C* total, int start, C* scratch) const {
    if (!scratch) {
      in_sequence(total, start);
    } else if (fold.graph) {
      by_graph(total, scratch, start);
    } else {
      in_a_tree(total, scratch);
    }
  }
};

// The first index behind a ring's block.
inline i64 block_end(const Fold& fold, i64 index, int block) {
  i64 i = fold.parts == 2 ? index >> 1 : index, end;
  if (fold.ring == LISTED_RING) {
    end = reinterpret_cast<const i64*>(fold.edges)[block + 1];
  } else if (fold.ring == SLICED_RING) {
    end = (i / fold.slice + 1) * fold.slice;
  } else {
    const i64 length = fold.total / fold.layout.members;
    const i64 longer = fold.total - length * fold.layout.members, passed = block + 1;
    end = passed * length + (passed < longer ? passed : longer);
  }
  return end * fold.parts;
}

// A fold's tile, ring by ring: `function` folds each block of one, from its first member on, or from
// the first instruction of its graph.
template <class Function>
inline void in_chains(const Fold& fold, Tile tile, Function function) {
  const bool ring = fold.ring != NO_RING;
  const i64 end = tile.index + tile.count;
  while (tile.index < end) {  // a chain for each block of a ring
    int start = 0;
    i64 stop = end;
    if (ring) {
      const int block = ring_block(fold, tile.index);
      const i64 edge = block_end(fold, tile.index, block);
      start = ring_start(fold, block);
      stop = edge < end ? edge : end;
    }
    tile.count = static_cast<int>(stop - tile.index);
    function(tile, start);
    tile.offset += tile.count * fold.layout.stride;
    tile.place += tile.count;
    tile.index = stop;
  }
}

template <class S, class C, int STEP, bool DRAWN>
inline void fold_tile(const Fold& fold, const Rounder& step, const Rounder& last, const Tile& tile,
                      int start, void* scratch) {
  typedef typename Total<S, C, STEP, DRAWN>::type T;
  alignas(64) T total[TILE];
  alignas(64) C values[TILE];
  u32 buffer[LANES];
  const Job<S, T, STEP, DRAWN> job = {fold, step, tile, buffer};
  bool scaled = false;
  if constexpr (SCALED_SUMS && sizeof(T) == 2) scaled = !scratch && job.sum_scaled(values, start);
  if (!scaled) job.run(total, start, static_cast<T*>(scratch));
  if constexpr (sizeof(T) == sizeof(C)) {
    store(total, fold.finish, last, tile, fold.layout.out, buffer);
  } else {
    if (!scaled) FOR_EACH(k, tile.count) values[k] = total[k];
    store(values, fold.finish, last, tile, fold.layout.out, buffer, scaled);
  }
}

// Part `part` of `parts` of a layout's tiles, in the order of the rows.
template <class Function>
inline void for_tiles(const Layout& layout, i64 part, i64 parts, Function function) {
  const i64 tiles = (layout.length + TILE - 1) / TILE, all = layout.rows * tiles;
  const i64 last = all * (part + 1) / parts;
  for (i64 number = all * part / parts; number < last; ++number) {
    i64 row = number / tiles;
    const i64 from = (number - row * tiles) * TILE, left = layout.length - from;
    Tile tile;
    tile.count = static_cast<int>(left < TILE ? left : TILE);
    tile.entry = row / layout.rows_of_value;
    tile.index = layout.first + (row - tile.entry * layout.rows_of_value) * layout.length + from;
    tile.place = row * layout.length + from;
    tile.offset = from * layout.stride;
    for (int axis = 0; axis < layout.axes; ++axis) {
      const i64 rest = row / layout.sizes[axis];
      tile.offset += (row - rest * layout.sizes[axis]) * layout.strides[axis];
      row = rest;
    }
    function(tile);
  }
}

// `scratch` has a tile of C for each level of a tree, or for each value of a graph's stack.
template <class S, class C, int STEP, bool DRAWN>
inline void fold_tiles(const Fold& fold, i64 part, i64 parts, void* scratch) {
  const Rounder step(fold.accumulator), last(fold.finish.target);
  for_tiles(fold.layout, part, parts, [&](const Tile& tile) {
    in_chains(fold, tile, [&](const Tile& part, int start) {
      fold_tile<S, C, STEP, DRAWN>(fold, step, last, part, start, scratch);
    });
  });
}

// The same, of which what one SENDS is rounded to a WIRE, a Step.
template <class S, class C, int STEP, int SENDS, int WIRE, bool DRAWN>
inline void fold_sent_tiles(const SentFold& given, i64 part, i64 parts, void* scratch) {
  const Fold& fold = given.fold;
  const Rounder step(fold.accumulator), wire(given.wire), last(fold.finish.target);
  const Sending sending = {wire, given.turned != 0};
  for_tiles(fold.layout, part, parts, [&](const Tile& tile) {
    in_chains(fold, tile, [&](const Tile& part, int start) {
      alignas(64) C total[TILE];
      u32 buffer[LANES];
      const Job<S, C, STEP, DRAWN, SENDS, WIRE> job = {fold, step, part, buffer, &sending};
      job.run(total, start, static_cast<C*>(scratch));
      if (!given.at_result) return store(total, fold.finish, last, part, fold.layout.out, buffer);
      settle(total, fold.finish, last, part, buffer, false);
      C* const values = total;
      job.template send<EXACT>(Values<C>{total}, fold.finish.step, [values, &part](auto sent) {
        const int count = part.count;
        FOR_EACH(k, count) values[k] = sent[k];
      });
      store(total, given.received, last, part, fold.layout.out, buffer);
    });
  });
}

struct Round {
  Layout layout;
  Finish finish;
};

template <class S, class C>
inline void round_tiles(const Round& round, i64 part, i64 parts, void*) {
  const Rounder last(round.finish.target);
  for_tiles(round.layout, part, parts, [&](const Tile& tile) {
    C values[TILE];
    u32 buffer[LANES];
    load<S>(values, members_of(round.layout).at(0, tile.offset), round.layout.stride, tile.count);
    store(values, round.finish, last, tile, round.layout.out, buffer);
  });
}

#define KERNEL(arguments, ...)                                                             \
  extern "C" __attribute__((visibility("default"))) void run(                              \
      const arguments* given, i64 part, i64 parts, void* scratch) {                        \
    __VA_ARGS__(*given, part, parts, scratch);                                             \
  }                                                                                        \
  extern "C" __attribute__((visibility("default"))) u64 bytes() { return sizeof(arguments); }
