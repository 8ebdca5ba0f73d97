// Kernels on whole arrays: messages that are rounded to a wire, and copies of rows.
#pragma once

#include "tiles.h"
#include "wire.cuh"

// Values (entries, elements) that are sent: docs/numerics.md, "On the wire".
struct Message {
  u64 values;
  i64 entries, elements;
  u64 starts;  // of blocks with one scale
  i64 blocks;
  u64 lanes;  // random numbers of all values
  i64 rule, max_exponent, drawn;
  Target target;
};

// What arrives of a message, rounded to the accumulator, and added to other values.
struct Addition {
  Message message;
  i64 sends;  // whether the values are sent at all
  u64 other;  // the address of the other values,
  i64 pitch;  // and elements from one entry to the next
  u64 lanes;  // random numbers of the sums
  i64 rounds, drawn;  // whether values and sums are rounded to the accumulator
  Target accumulator;
};

// The scale of a block of values.
template <class C, class Wire>
inline C scale_of_block(const C* values, i64 count, const Wire& wire) {
  typename Bits<C>::Word most = 0;
  if (count == 32) {  // as MX has them: without a loop
    FOR_EACH(k, 32) {
      const auto next = magnitude_of(values[k]);
      most = next > most ? next : most;
    }
  } else {
    FOR_EACH(k, count) {
      const auto next = magnitude_of(values[k]);
      most = next > most ? next : most;
    }
  }
  return scale_of(Bits<C>::value(most), wire);
}

template <class C, bool DRAWN>
inline void send_tile(C* values, int count, const C* scales, const Rounder& rounder,
                      const u32* lanes) {
  const C largest = static_cast<C>(rounder.target.largest);
  const C lowest = static_cast<C>(rounder.target.lowest);
  if (scales) {
    FOR_EACH(k, count) {
      const C value = values[k] / scales[k];
      values[k] = value > largest ? largest : value < lowest ? lowest : value;
    }
  }
  round_all<C, DRAWN>(values, count, rounder, lanes);
  if (scales) {
    FOR_EACH(k, count) values[k] = values[k] * scales[k];
  }
}

// A message is sent, tile by tile; `then` does the rest with each: its first element, its number of
// elements, and the entry.
template <class C, class Then>
inline void send(const Message& message, bool sends, Then then) {
  const u32* const lanes = reinterpret_cast<const u32*>(message.lanes);
  const i64* const starts = reinterpret_cast<const i64*>(message.starts);
  const Rounder rounder(message.target);
  const bool scaled = sends && message.rule != UNSCALED;
  C spread[TILE], scale = 1;
  for (i64 entry = 0; entry < message.entries; ++entry) {
    C* const row = reinterpret_cast<C*>(message.values) + entry * message.elements;
    const u32* const drawn = lanes + entry * message.elements;
    i64 end = 0, block = 0;  // of the block that `scale` is of; the next block
    for (i64 first = 0; first < message.elements; first += TILE) {
      const i64 left = message.elements - first, count = left < TILE ? left : TILE;
      for (i64 at = first; scaled && at < first + count;) {
        if (at == end) {
          ++block;
          end = block < message.blocks ? starts[block] : message.elements;
          scale = scale_of_block(row + at, end - at, message);
        }
        const i64 stop = end < first + count ? end : first + count;
        FOR_EACH(k, stop - at) spread[at - first + k] = scale;
        at = stop;
      }
      const C* const scales = scaled ? spread : nullptr;
      const int here = static_cast<int>(count);
      if (sends && message.drawn) {
        send_tile<C, true>(row + first, here, scales, rounder, drawn + first);
      } else if (sends) {
        send_tile<C, false>(row + first, here, scales, rounder, nullptr);
      }
      then(row, entry, first, here);
    }
  }
}

template <class C>
inline void add(const Addition& given) {
  const Rounder rounder(given.accumulator);
  const u32* const lanes = reinterpret_cast<const u32*>(given.lanes);
  send<C>(given.message, given.sends, [&](C* row, i64 entry, i64 first, int count) {
    C* const values = row + first;
    const C* const other = reinterpret_cast<const C*>(given.other) + entry * given.pitch + first;
    if (given.rounds && given.sends) round_all<C, false>(values, count, rounder, nullptr);
    FOR_EACH(k, count) values[k] = values[k] + other[k];
    if (given.drawn) {
      const i64 at = entry * given.message.elements + first;
      round_all<C, true>(values, count, rounder, lanes + at);
    } else if (given.rounds) {
      round_all<C, false>(values, count, rounder, nullptr);
    }
  });
}

// The chain of one message: members in the order of their visits, of which what is sent is rounded.
struct Chain {
  u64 out;  // totals (entries, elements)
  i64 pitch, entries, elements;
  u64 members;   // their addresses,
  u64 numbers;   // and their numbers in the group
  i64 count, member_pitch, source;
  u64 starts;  // of blocks with one scale
  i64 blocks;
  u64 places;  // the batch offset of each entry
  i64 index;   // of the first element, for random numbers
  u64 call;
  u64 seed, added, sent;  // the streams of sums and of messages
  i64 at_hops, at_members, wire_drawn, rule, max_exponent;
  Target target;
  i64 rounds, drawn;
  Target accumulator;
};

template <class C>
inline void load_any(C* values, const char* at, i64 source, int count) {
  switch (source) {  // in the order of arrays.py
    case 0: return load<float64>(values, at, 8, count);
    case 1: return load<float32>(values, at, 4, count);
    case 2: return load<float16>(values, at, 2, count);
    case 3: return load<bfloat16>(values, at, 2, count);
    case 4: return load<float8_e5m2>(values, at, 1, count);
    case 5: return load<float8_e4m3fn>(values, at, 1, count);
    case 6: return load<float8_e5m2fnuz>(values, at, 1, count);
    default: return load<float8_e4m3fnuz>(values, at, 1, count);
  }
}

template <class C>
struct ChainTile {
  const Chain& chain;
  const Rounder &wire, &sum;
  i64 entry, first, block, last;  // the blocks block..last-1 are those of the tile
  int count;
  u32* buffer;

  const u32* draw(u64 stream, u64 step) const {
    const u64 place = reinterpret_cast<const u64*>(chain.places)[entry];
    return draw_lanes(buffer, chain.index + first, count, chain.seed, step, chain.call, place, stream);
  }

  // What arrives of values, whose message has number `step`.
  void send(C* values, u64 step) const {
    C spread[TILE];
    const bool scaled = chain.rule != UNSCALED;
    const i64* const starts = reinterpret_cast<const i64*>(chain.starts);
    for (i64 number = block; scaled && number < last; ++number) {
      const i64 from = starts[number] - first;
      const i64 end = (number + 1 < chain.blocks ? starts[number + 1] : chain.elements) - first;
      const C scale = scale_of_block(values + from, end - from, chain);
      FOR_EACH(k, end - from) spread[from + k] = scale;
    }
    const C* const scales = scaled ? spread : nullptr;
    if (chain.wire_drawn) {
      send_tile<C, true>(values, count, scales, wire, draw(chain.sent, step));
    } else {
      send_tile<C, false>(values, count, scales, wire, nullptr);
    }
    if (chain.rounds) round_all<C, false>(values, count, sum, nullptr);
  }

  void load_member(C* values, i64 visit, int bytes) const {
    const char* at = reinterpret_cast<const char*>(reinterpret_cast<const u64*>(chain.members)[visit]);
    load_any(values, at + (entry * chain.member_pitch + first) * bytes, chain.source, count);
    if (!chain.at_members) return;
    const i64 number = reinterpret_cast<const i64*>(chain.numbers)[visit];
    send(values, static_cast<u64>(chain.count + 1 + number));
  }

  void fold() const {
    C total[TILE], other[TILE];
    const int bytes = chain.source == 0 ? 8 : chain.source == 1 ? 4 : chain.source < 4 ? 2 : 1;
    load_member(total, 0, bytes);
    for (i64 step = 1; step < chain.count; ++step) {
      if (chain.at_hops) send(total, static_cast<u64>(step));
      load_member(other, step, bytes);
      FOR_EACH(k, count) total[k] = total[k] + other[k];
      if (chain.drawn) {
        round_all<C, true>(total, count, sum, draw(chain.added, static_cast<u64>(step)));
      } else if (chain.rounds) {
        round_all<C, false>(total, count, sum, nullptr);
      }
    }
    C* const out = reinterpret_cast<C*>(chain.out) + entry * chain.pitch + first;
    FOR_EACH(k, count) out[k] = total[k];
  }
};

// Tiles hold whole blocks, which have at most TILE elements.
template <class C>
inline void fold_chain(const Chain& chain) {
  u32 buffer[LANES];
  const Rounder wire(chain.target), sum(chain.accumulator);
  const i64* const starts = reinterpret_cast<const i64*>(chain.starts);
  for (i64 entry = 0; entry < chain.entries; ++entry) {
    for (i64 first = 0, block = 0; first < chain.elements;) {
      i64 end = first + TILE < chain.elements ? first + TILE : chain.elements, last = block;
      if (chain.rule != UNSCALED) {
        while (last < chain.blocks && starts[last] < end) ++last;
        const i64 stop = last < chain.blocks ? starts[last] : chain.elements;
        if (stop > first + TILE) end = starts[--last];
      }
      const ChainTile<C> tile = {chain, wire,  sum, entry, first, block, last,
                                 static_cast<int>(end - first), buffer};
      tile.fold();
      first = end;
      block = last;
    }
  }
}

#define EXPORTED extern "C" __attribute__((visibility("default")))
EXPORTED void send_float(const Message* message) {
  send<float>(*message, true, [](float*, i64, i64, int) {});
}
EXPORTED void send_double(const Message* message) {
  send<double>(*message, true, [](double*, i64, i64, int) {});
}
EXPORTED void add_float(const Addition* given) { add<float>(*given); }
EXPORTED void add_double(const Addition* given) { add<double>(*given); }
EXPORTED void chain_float(const Chain* chain) { fold_chain<float>(*chain); }
EXPORTED void chain_double(const Chain* chain) { fold_chain<double>(*chain); }
EXPORTED u64 bytes() { return sizeof(Addition) + sizeof(Chain); }
using Line = u64 __attribute__((vector_size(64)));
// memcpy past the caches, for destinations that are larger than these.
inline void stream(char* to, const char* from, i64 size) {
  i64 done = -reinterpret_cast<i64>(to) & 63;
  if (done > size) done = size;
  __builtin_memcpy(to, from, static_cast<u64>(done));
  for (; done + 64 <= size; done += 64) {
    Line line;
    __builtin_memcpy(&line, from + done, sizeof line);
    __builtin_nontemporal_store(line, reinterpret_cast<Line*>(to + done));
  }
  __builtin_memcpy(to + done, from + done, static_cast<u64>(size - done));
}

// Segments (source, row, destination, row, rows) of arrays of so many rows for each replica.
EXPORTED void copy_segments(char* to, const char* from, const i64* segments, i64 count,
                            i64 source_rows, i64 target_rows, i64 row_bytes, i64 streams) {
  for (i64 k = 0; k < count; ++k, segments += 5) {
    char* const target = to + (segments[2] * target_rows + segments[3]) * row_bytes;
    const char* const source = from + (segments[0] * source_rows + segments[1]) * row_bytes;
    if (streams) {
      stream(target, source, segments[4] * row_bytes);
    } else {
      __builtin_memcpy(target, source, static_cast<u64>(segments[4] * row_bytes));
    }
  }
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // what was streamed is seen by other threads
}
// An array whose elements are runs of `size` bytes. `axes` are the array's, each its length, and its
// strides in `to` and `from` in bytes.
struct Axis {
  i64 length, to, from;
};
inline void stream_runs(char* to, const char* from, i64 size, const Axis* axes, i64 count) {
  if (!count) return stream(to, from, size);
  for (i64 k = 0; k < axes->length; ++k) {
    stream_runs(to + k * axes->to, from + k * axes->from, size, axes + 1, count - 1);
  }
}
EXPORTED void copy_runs(char* to, const char* from, i64 size, const Axis* axes, i64 count) {
  stream_runs(to, from, size, axes, count);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
// The segments of all slices that are not empty, by sender and slice, and their number, which stays
// as it is if a slice is wrong, or meets another one on its receiver. `table` is input_offsets, send_sizes,
// output_offsets and recv_sizes, each (replicas, entries, slices); `covered` is 0 for each row of a
// receiver; `members` is (groups, members), and `places` where each replica is in it.
EXPORTED void check_slices(i64* segments, i64* filled, u8* covered, const i64* table,
                           const i64* members, const i64* places, i64 replicas, i64 entries,
                           i64 slices, i64 group_size, i64 source_rows, i64 target_rows) {
  const i64 all = replicas * entries * slices, each = slices / group_size;
  const i64 *const from = table, *const sizes = from + all, *const to = sizes + all,
                   *const received = to + all;
  i64 at = 0, *segment = segments;
  for (i64 sender = 0; sender < replicas * entries; ++sender) {
    const i64 replica = sender / entries, entry = sender % entries;
    const i64 position = places[replica] % group_size;
    const i64* const group = members + (places[replica] - position);
    for (i64 member = 0; member < group_size; ++member) {
      const i64 receiver = group[member] * entries + entry;
      const i64* const expected = received + receiver * slices + position * each;
      for (i64 k = 0; k < each; ++k, ++at) {
        const i64 size = sizes[at];
        if (size < 0 || size != expected[k] || from[at] < 0 || from[at] > source_rows - size ||
            to[at] < 0 || to[at] > target_rows - size) {
          return;
        }
        if (!size) continue;
        u8* const rows = covered + receiver * target_rows + to[at];
        u8 met = 0;
        for (i64 row = 0; row < size; ++row) {
          met |= rows[row];
          rows[row] = 1;
        }
        if (met) return;
        const i64 made[] = {sender, from[at], receiver, to[at], size};
        __builtin_memcpy(segment, made, sizeof made);
        segment += 5;
      }
    }
  }
  *filled = (segment - segments) / 5;
}
EXPORTED void draw_blocks(u32* lanes, i64 blocks, u64 seed, u64 stream, u64 first, u64 step,
                          u64 call, u64 offset) {
  i64 block = 0;
  for (; block + 8 <= blocks; block += 8) {
    philox_eight(lanes + 8 * block, seed, first + block, step, call, offset, stream);
  }
  for (; block < blocks; ++block) {
    const Block drawn = philox(seed, first + block, step, call, offset, stream);
    __builtin_memcpy(lanes + 8 * block, drawn.words, sizeof drawn.words);
  }
}
