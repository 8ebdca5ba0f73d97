// hop: an addition of which one operand was sent, rounded to a wire; and amax: the largest magnitude of
// each block that has one scale. docs/numerics.md, "On the wire", has the contract.
// A thread has a few elements, or a whole block if blocks are short. Threads share nothing.
#include "wire.cuh"

// Where values are: members of the source's format, or a partial result of the computing type.
struct Operand {
  u64 base;     // of a partial result, or 0
  u64 table;    // the members' addresses
  i64 pitch;    // elements from one batch entry of a member to the next
  i64 member;   // the member; of a chain, what is added to the one that it starts with
  i64 chained;
};

// All members have 8 bytes, so that the host lays it out as the device does.
struct Hop {
  Operand sent, kept;
  i64 adds;                // whether `kept` is added
  i64 rule, rounding, wide, drawn;  // of the wire; `wide`: it is computed in float64
  i64 max_exponent;
  u64 stream, step;        // of the wire's random numbers
  i64 by_member;           // whether the member's number is added to `step`
  Target target;
  i64 arrives;             // whether what is sent is rounded to the accumulator
  i64 rounds, sum_drawn;   // whether the sum is
  u64 sum_step;
  Target accumulator;
  Finish finish;
  u64 edges, blocks, bases, starts;  // of messages: ends, first block, where it begins, first member
  i64 messages, members;
  i64 length;              // of a block with one scale
  i64 entries, elements, units;
  i64 width;               // elements of a unit; 0: a unit is a block
  u64 amax;                // the blocks' largest magnitudes, if a unit is not a block
  i64 pieces, reduces;     // of amax: results for a block, and the ones that they are made of
  i64 slices, slice;       // elements are numbered slice by slice: these are of an axis
  u64 out;
  i64 out_pitch, out_placed;  // whether it is in the value's own order
};

__device__ __forceinline__ i64 entry_of(u64 table, i64 index) {
  return __ldg(reinterpret_cast<const i64*>(table) + index);
}

// The last of `count` entries that is not above `value`.
__device__ __forceinline__ int last_below(u64 table, i64 count, i64 value) {
  i64 low = 0, high = count;
  while (high - low > 1) {
    const i64 middle = (low + high) >> 1;
    if (entry_of(table, middle) <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return static_cast<int>(low);
}

// The number of an element in the value's own order.
__device__ __forceinline__ i64 place_of(const Hop& hop, i64 index) {
  if (hop.slices == 1) return index;
  const i64 row = quotient(index, hop.slice), rows = quotient(hop.elements, hop.slice * hop.slices);
  const i64 number = quotient(row, rows);
  return ((row - number * rows) * hop.slices + number) * hop.slice + index - row * hop.slice;
}

__device__ __forceinline__ i64 member_of(const Hop& hop, const Operand& from, int message) {
  i64 member = from.member;
  if (from.chained) member += entry_of(hop.starts, message);
  return member < hop.members ? member : member - hop.members;
}

template <class S, class C>
__device__ __forceinline__ C value_at(const Hop& hop, const Operand& from, i64 entry, i64 index,
                                      int message) {
  if (from.base) return reinterpret_cast<const C*>(from.base)[entry * hop.elements + index];
  const i64 member = member_of(hop, from, message);
  const char* at = reinterpret_cast<const char*>(entry_of(from.table, member));
  at += (entry * from.pitch + place_of(hop, index)) * S::BYTES;
  return static_cast<C>(value_of(S(), load_element<S::BYTES>(at)));
}

// Elements from..to-1, of a message.
struct Range {
  i64 from, to;
  int message;
};

__device__ __forceinline__ Range block_of(const Hop& hop, i64 block) {
  const int message = last_below(hop.blocks, hop.messages, block);
  const i64 first = entry_of(hop.edges, message), end = entry_of(hop.edges, message + 1);
  i64 from = entry_of(hop.bases, message) + (block - entry_of(hop.blocks, message)) * hop.length;
  const i64 to = from + hop.length;
  return {from < first ? first : from, to < end ? to : end, message};
}

template <class W>
__device__ __forceinline__ W sent(W value, W amax, const Hop& hop, u32 lane) {
  W scale = 1;
  if (hop.rule != UNSCALED) {
    scale = scale_of(amax, hop);
    const W largest = static_cast<W>(hop.target.largest), lowest = static_cast<W>(hop.target.lowest);
    value = value / scale;
    value = value > largest ? largest : value < lowest ? lowest : value;
  }
  if (hop.rounding == TO_FLOAT32) value = static_cast<float>(value);
  if (hop.rounding == TO_TARGET) value = round_to_target(value, hop.target, hop.drawn, lane);
  return hop.rule != UNSCALED ? value * scale : value;
}

// One stream of random numbers: the block of the last element is kept.
struct Stream {
  u64 seed, stream, call, offset;
  u64 number, step;
  Block block;

  __device__ __forceinline__ u32 lane(i64 place, u64 at) {
    const u64 wanted = 1 + static_cast<u64>(place >> 3);
    if (wanted != number || at != step) {
      number = wanted;
      step = at;
      block = philox(seed, number, step, call, offset, stream);
    }
    return block.lane(static_cast<int>(place) & 7);
  }
};

template <class C>
__device__ __forceinline__ void store(const Hop& hop, i64 at, C value) {
  const Finish& finish = hop.finish;
  if (finish.encoding == AS_FLOAT8) {
    value = __uint_as_float(code_of(static_cast<float>(value), finish.target));
  }
  const int bytes = output_bytes(finish);
  char* out = reinterpret_cast<char*>(hop.out) + at * bytes;
  if (bytes == 1) store_element<1>(out, encode<1>(value, finish));
  if (bytes == 2) store_element<2>(out, encode<2>(value, finish));
  if (bytes == 4) store_element<4>(out, encode<4>(value, finish));
  if (bytes == 8) store_element<8>(out, encode<8>(value, finish));
}

template <class S, class C>
__global__ void __launch_bounds__(256, 2) hop(const Hop hop) {
  typedef Bits<C> B;
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= hop.entries * hop.units) return;
  const i64 entry = quotient(thread, hop.units), unit = thread - entry * hop.units;
  Range range;
  C amax = 0;
  if (hop.width) {
    range.from = unit * hop.width;
    range.to = range.from + hop.width < hop.elements ? range.from + hop.width : hop.elements;
    range.message = last_below(hop.edges, hop.messages, range.from);
  } else {
    range = block_of(hop, unit);
    typename B::Word most = 0;
    for (i64 index = range.from; index < range.to; ++index) {
      const auto next = magnitude_of(value_at<S, C>(hop, hop.sent, entry, index, range.message));
      most = next > most ? next : most;
    }
    amax = B::value(most);
  }
  const Finish& finish = hop.finish;
  const u64 offset = finish.batch_offsets
                         ? __ldg(reinterpret_cast<const u64*>(finish.batch_offsets) + entry)
                         : finish.batch_offset;
  Stream wire = {finish.seed, hop.stream, finish.call, offset, 0, 0, {}}, sums = wire, last = wire;
  sums.stream = last.stream = finish.stream;
  int message = range.message;
#pragma unroll 1
  for (i64 index = range.from; index < range.to; ++index) {
    while (index >= entry_of(hop.edges, message + 1)) ++message;
    const i64 place = place_of(hop, index);
    C value = value_at<S, C>(hop, hop.sent, entry, index, message);
    if (hop.rounding != UNROUNDED) {
      if (hop.width && hop.rule != UNSCALED) {
        const i64 block = entry_of(hop.blocks, message) +
                          quotient(index - entry_of(hop.bases, message), hop.length);
        const i64 row = entry * entry_of(hop.blocks, hop.messages) + block;
        amax = reinterpret_cast<const C*>(hop.amax)[row];
      }
      u32 lane = 0;
      if (hop.drawn) {
        const u64 more = hop.by_member ? static_cast<u64>(member_of(hop, hop.sent, message)) : 0;
        lane = wire.lane(place, hop.step + more);
      }
      if (sizeof(C) == 4 && hop.wide) {
        value = static_cast<C>(
            sent<double>(static_cast<double>(value), static_cast<double>(amax), hop, lane));
      } else {
        value = sent<C>(value, amax, hop, lane);
      }
    }
    if (hop.arrives) value = round_to_target(value, hop.accumulator, false, 0u);
    if (hop.adds) value = value + value_at<S, C>(hop, hop.kept, entry, index, message);
    if (hop.rounds) {
      const u32 lane = hop.sum_drawn ? sums.lane(place, hop.sum_step) : 0u;
      value = round_to_target(value, hop.accumulator, hop.sum_drawn, lane);
    }
    value = last_value(value, finish, finish.drawn ? last.lane(place, finish.step) : 0u);
    store(hop, entry * hop.out_pitch + (hop.out_placed ? place : index), value);
  }
}

// The largest magnitudes of what is sent: a few for each block, each of some of its elements, which lie
// apart so that neighbouring threads read neighbours. `reduces`: of the results of an earlier launch.
template <class S, class C>
__global__ void __launch_bounds__(256, 1) amax(const Hop hop) {
  typedef Bits<C> B;
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= hop.entries * hop.units) return;
  const i64 row = quotient(thread, hop.pieces), piece = thread - row * hop.pieces;
  typename B::Word most = 0;
  if (hop.reduces) {
    const C* from = reinterpret_cast<const C*>(hop.amax) + row * hop.reduces;
    for (i64 index = piece; index < hop.reduces; index += hop.pieces) {
      const auto next = magnitude_of(from[index]);
      most = next > most ? next : most;
    }
  } else {
    const i64 entry = quotient(thread, hop.units);
    const Range range = block_of(hop, row - entry * quotient(hop.units, hop.pieces));
    for (i64 index = range.from + piece; index < range.to; index += hop.pieces) {
      const auto next = magnitude_of(value_at<S, C>(hop, hop.sent, entry, index, range.message));
      most = next > most ? next : most;
    }
  }
  reinterpret_cast<C*>(hop.out)[thread] = B::value(most);
}
