// What the kernels of wires share: the elements of a thread, the rounding of what is sent, and of sums.
// docs/numerics.md, "On the wire", has the contract. The threads of a unit have a block with one
// scale; without a scale a unit is a thread, and its block a chunk.
#pragma once

#include "members.cuh"
#include "wire.cuh"

enum At { NOWHERE, HOPS, MEMBERS };

// All members have 8 bytes, so that the host lays it out as the device does.
struct Sent {
  u64 base, table;       // the first member's address; or 0, and the address of all their addresses
  i64 stride, members;   // bytes from member to member
  i64 visited;           // members of a fold; 1 if each is sent to a result of its own
  i64 turned;            // whether the last member comes first
  i64 alike, pitch;      // as of Layout; bytes from one batch entry of a member to the next
  i64 rows, entries, elements;  // rows: entries, for each result of its own
  u64 tables;            // int64s: where they begin, by their names
  i64 edges, blocks, bases, starts, program;
  i64 messages, units;   // units: of a row
  i64 length, shift;     // of a block; chunks begin where index + shift is a multiple of their length
  i64 lanes, passes;     // the threads of a unit (0: those of a block), and the chunks of each
  i64 slices, slice;     // elements are numbered slice by slice: these are of an axis
  i64 at, result_sent, first_is_sent;
  i64 rule, rounding, wide, drawn;  // of the wire; `wide`: it is computed in float64
  i64 max_exponent;
  u64 stream, member_step, result_step;  // of the wire's random numbers
  Target target;
  i64 step, step_drawn;  // the rounding of what arrives, of quotients and of sums to the accumulator
  u64 lone_step;         // at which a member by itself is rounded as a sum; or 0
  Target accumulator;
  i64 divides;           // whether members are divided
  double divisor;
  i64 instructions;      // of the program, as Fold's graph; 0: a chain
  i64 depth;             // values that the machine holds at once
  u64 workspace;         // where they are; 0: in shared memory
  u64 largest;           // of many thread blocks to a unit: the largest magnitudes, or 0
  i64 begin, values;     // the first instruction of the launch, and the values before it
  i64 resumes;           // whether its largest magnitude is known
  Finish finish;
  i64 result_rounding;   // of a result that was sent
  u64 out;
};

__device__ __forceinline__ i64 entry_of(const Sent& sent, i64 table, i64 index) {
  return __ldg(reinterpret_cast<const i64*>(sent.tables) + table + index);
}

// The last of the messages whose first block is not above `block`.
__device__ __forceinline__ int message_of(const Sent& sent, i64 block) {
  i64 low = 0, high = sent.messages;
  while (high - low > 1) {
    const i64 middle = (low + high) >> 1;
    if (entry_of(sent, sent.blocks, middle) <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return static_cast<int>(low);
}

// What a thread has: some chunks of elements from..to-1.
struct Unit {
  i64 row, entry;
  int start;    // the first member visited
  i64 from, to, chunk;
  i64 offset;   // bytes from a member's address to the entry's element 0
  u64 place;    // of the entry, for random numbers
};

template <int COUNT>
__device__ __forceinline__ Unit unit_of(const Sent& sent) {
  Unit unit;
  i64 number = blockIdx.x, lane = threadIdx.x;
  if (sent.lanes) {
    const i64 thread = number * blockDim.x + lane;
    number = quotient(thread, sent.lanes);
    lane = thread - number * sent.lanes;
  }
  unit.row = quotient(number, sent.units);
  const i64 block = number - unit.row * sent.units;
  const bool exists = unit.row < sent.rows;  // others take part in the warp's exchanges
  if (!exists) unit.row = 0;
  const i64 group = sent.visited == 1 ? quotient(unit.row, sent.entries) : 0;
  unit.entry = unit.row - group * sent.entries;
  const int message = sent.messages == 1 ? 0 : message_of(sent, block);
  const i64 first = entry_of(sent, sent.edges, message), end = entry_of(sent, sent.edges, message + 1);
  unit.from = entry_of(sent, sent.bases, message) +
              (block - entry_of(sent, sent.blocks, message)) * sent.length;
  unit.to = unit.from + sent.length;
  if (unit.from < first) unit.from = first;
  if (unit.to > end) unit.to = end;
  if (!exists) unit.to = unit.from;
  unit.chunk = quotient(unit.from + sent.shift, COUNT) + lane;
  unit.start = static_cast<int>(group + entry_of(sent, sent.starts, message));
  unit.offset = unit.entry * sent.pitch;
  unit.place = sent.finish.batch_offsets
                   ? __ldg(reinterpret_cast<const u64*>(sent.finish.batch_offsets) + unit.entry)
                   : sent.finish.batch_offset;
  return unit;
}

// A chunk: elements from..to-1 of those from `index` on.
struct Part {
  i64 index;
  int from, to;
  bool whole;  // whether it is read by wide accesses

  __device__ __forceinline__ bool empty() const { return from >= to; }
};

template <class S, int COUNT>
__device__ __forceinline__ Part part_of(const Sent& sent, const Unit& unit, const Members& members,
                                        i64 chunk) {
  Part part;
  part.index = chunk * COUNT - sent.shift;
  const i64 from = unit.from - part.index, to = unit.to - part.index;
  part.from = from > 0 ? from < COUNT ? static_cast<int>(from) : COUNT : 0;
  part.to = to < COUNT ? to > 0 ? static_cast<int>(to) : 0 : COUNT;
  const int width = access_width(S::BYTES * COUNT);
  const char* at = members.at(0, unit.offset + part.index * S::BYTES);
  part.whole = part.from == 0 && part.to == COUNT && sent.alike >= width &&
               (reinterpret_cast<u64>(at) & (width - 1)) == 0;
  return part;
}

__device__ __forceinline__ Members members_of(const Sent& sent) {
  return {reinterpret_cast<const char*>(sent.base), reinterpret_cast<const u64*>(sent.table), sent.stride};
}

// The number of an element in the value's own order.
__device__ __forceinline__ i64 place_of(const Sent& sent, i64 index) {
  if (sent.slices == 1) return index;
  const i64 row = quotient(index, sent.slice);
  const i64 rows = quotient(sent.elements, sent.slice * sent.slices), number = quotient(row, rows);
  return ((row - number * rows) * sent.slices + number) * sent.slice + index - row * sent.slice;
}

// One stream of random numbers: the block of the last element is kept.
struct Stream {
  u64 seed, stream, call, offset, step;
  u64 number = 0;
  Block block = {};

  __device__ __forceinline__ u32 lane(i64 place) {
    const u64 wanted = 1 + static_cast<u64>(place >> 3);
    if (wanted != number) {
      number = wanted;
      block = philox(seed, number, step, call, offset, stream);
    }
    return block.lane(static_cast<int>(place) & 7);
  }
};

__device__ __forceinline__ Stream stream_of(const Sent& sent, u64 stream, u64 place, u64 step) {
  return {sent.finish.seed, stream, sent.finish.call, place, step};
}

// To nearest, to a format with a fraction and with all of its subnormal numbers, whose normal ones are
// normal in float32.
__device__ __forceinline__ float round_plain(float value, const Target& target) {
  const u32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const int fraction = static_cast<int>(target.fraction_bits), dropped = 23 - fraction;
  const int least = static_cast<int>(target.min_exponent);
  const u32 up = (1u << (dropped - 1)) - 1 + (magnitude >> dropped & 1);
  float result = __uint_as_float((magnitude + up) & ~0u << dropped);
  if (magnitude < static_cast<u32>(least + 127) << 23) {
    // The sum's last bit is the format's least number.
    const float magic = __uint_as_float(static_cast<u32>(least - fraction + 23 + 127) << 23);
    result = (__uint_as_float(magnitude) + magic) - magic;
  }
  if (result > static_cast<float>(target.largest)) {
    result = __uint_as_float(target.has_infinity ? 0x7f800000u : 0x7fc00000u);
  }
  u32 sign = bits & 0x80000000u;
  if (!target.has_negative_zero && result == 0) sign = 0;
  return magnitude > 0x7f800000u ? value : __uint_as_float(__float_as_uint(result) | sign);
}

template <int COUNT>
__device__ __forceinline__ void round_all(float (&values)[COUNT], i64 rounding, const Target& target) {
  if (rounding == TO_BFLOAT16) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) values[index] = round_bfloat16(values[index]);
  } else if (rounding == TO_FLOAT16) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      values[index] = float_of_half(half_of_float(values[index]));
    }
  } else if (rounding == TO_TARGET) {
#pragma unroll
    for (int index = 0; index < COUNT; ++index) values[index] = round_plain(values[index], target);
  }
}

// Values of a block with this largest magnitude, as they are sent: to nearest, in float32, and in plain
// formats.
template <int COUNT>
__device__ __forceinline__ void send_quickly(float (&values)[COUNT], u32 most, const Sent& sent,
                                             bool scaled) {
  if (!scaled) {
    round_all(values, sent.rounding, sent.target);
  } else {
    const float scale = scale_of(__uint_as_float(most), sent), inverse = 1 / scale;
    const float largest = static_cast<float>(sent.target.largest);
    if (sent.rule == AMAX) {
#pragma unroll
      for (int index = 0; index < COUNT; ++index) values[index] = values[index] / scale;
    } else {  // powers of two: exact
#pragma unroll
      for (int index = 0; index < COUNT; ++index) values[index] = values[index] * inverse;
    }
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      const float value = values[index];
      values[index] = value > largest ? largest : value < -largest ? -largest : value;
    }
    round_all(values, sent.rounding, sent.target);
#pragma unroll
    for (int index = 0; index < COUNT; ++index) values[index] = values[index] * scale;
  }
}

// Any wire, one element after the other.
template <class W, class C, int COUNT>
__device__ __forceinline__ void send_slowly(C (&values)[COUNT], W amax, const Sent& sent, i64 index,
                                            u64 step, u64 place) {
  const bool scaled = sent.rule != UNSCALED;
  const W scale = scaled ? scale_of(amax, sent) : 1;
  const W largest = static_cast<W>(sent.target.largest), lowest = static_cast<W>(sent.target.lowest);
  Stream stream = stream_of(sent, sent.stream, place, step);
#pragma unroll 1
  for (int element = 0; element < COUNT; ++element) {
    W value = static_cast<W>(values[0]);
    if (scaled) {
      value = value / scale;
      value = value > largest ? largest : value < lowest ? lowest : value;
    }
    const u32 lane = sent.drawn ? stream.lane(place_of(sent, index + element)) : 0u;
    if (sent.rounding == TO_FLOAT32) value = static_cast<float>(value);
    if (sent.rounding == TO_TARGET) value = round_to_target(value, sent.target, sent.drawn, lane);
    if (scaled) value = value * scale;
    turn(values, static_cast<C>(value));
  }
}

template <class C, int COUNT>
__device__ __forceinline__ typename Bits<C>::Word largest_of(const C (&values)[COUNT]) {
  typename Bits<C>::Word most = 0;
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    const auto next = magnitude_of(values[index]);
    most = next > most ? next : most;
  }
  return most;
}

// The largest of `lanes` neighbouring threads of a warp, a power of two.
template <class Word>
__device__ __forceinline__ Word largest_of_lanes(Word most, int lanes) {
#pragma unroll 1
  for (int apart = lanes >> 1; apart; apart >>= 1) {
    const Word other = __shfl_xor_sync(0xffffffffu, most, apart);
    most = other > most ? other : most;
  }
  return most;
}

// A fold's last values, in place, before a result is sent.
template <class C, int COUNT>
__device__ __forceinline__ void finish_values(C (&values)[COUNT], const Sent& sent, i64 index, u64 place) {
  const Finish& finish = sent.finish;
  if (!(finish.divides || finish.rounding != UNROUNDED || finish.from_zero)) return;
  Stream stream = stream_of(sent, finish.stream, place, finish.step);
#pragma unroll 1
  for (int element = 0; element < COUNT; ++element) {
    const u32 lane = finish.drawn ? stream.lane(place_of(sent, index + element)) : 0u;
    turn(values, last_value(values[0], finish, lane));
  }
}

// Store values that are in the output's format; of a result that was sent, once they are.
template <class C, int COUNT>
__device__ __forceinline__ void store_part(C (&values)[COUNT], const Sent& sent, const Unit& unit,
                                           const Part& part) {
  const Finish& finish = sent.finish;
  const bool rounds = sent.result_sent && sent.result_rounding != UNROUNDED;
  if (rounds || finish.encoding == AS_FLOAT8) {
#pragma unroll 1
    for (int element = 0; element < COUNT; ++element) {
      C value = values[0];
      if (rounds) value = rounded_to(value, sent.result_rounding, finish.target, false, 0u);
      if (finish.encoding == AS_FLOAT8) {
        value = __uint_as_float(code_of(static_cast<float>(value), finish.target));
      }
      turn(values, value);
    }
  }
  const i64 at = unit.row * sent.elements + part.index;
  store_values(values, finish, sent.out, at, part.from, part.to);
}
