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
// All rows of a ragged_all_to_all, in arrays (replicas, entries, rows) of rows of so many bytes.
struct Exchange {
  u64 target, source, output;
  i64 source_pitch, output_pitch;  // bytes from one replica to the next, in the target side by side
  u64 offsets, sizes, starts, received;  // the arguments, (replicas, entries, slices)
  u64 members;  // (groups, group_size)
  i64 entries, slices, group_size, source_rows, target_rows, row, streams;
  u64 fault;  // where 1 is written if a slice is wrong, or is not behind those before it
};
const int RECEIVERS = 16;  // that are checked together, as in arrays.py: a vector of 32 bits each
const int STREAMS = 8;     // receivers that are written together: a nearest cache has as many ways
// Out of line, so that the loop around it stays small.
__attribute__((noinline)) void move(char* to, const char* from, i64 size, bool streams) {
  if (streams) {
    stream(to, from, size);
  } else {
    __builtin_memcpy(to, from, static_cast<u64>(size));
  }
}

// Members of a group that receive at one batch entry. U is the arguments' type without a sign: a
// negative number is larger than any array. EACH is the number of slices for a receiver, if it is
// known: loops over a constant number of neighbours are vectors.
template <class U, int EACH>
struct Receivers {
  const Exchange given;
  const i64* group;
  i64 entry, first, count;
  const U* const offsets = reinterpret_cast<const U*>(given.offsets);
  const U* const sizes = reinterpret_cast<const U*>(given.sizes);
  const U* const starts = reinterpret_cast<const U*>(given.starts);
  const U* const received = reinterpret_cast<const U*>(given.received);

  static U least(U a, U b) { return a < b ? a : b; }
  // A number of rows, of which no argument is larger than U's largest integer with a sign.
  static U limit(i64 rows) { return static_cast<u64>(rows) < (~U(0) >> 1) ? rows : ~U(0) >> 1; }
  i64 each() const { return EACH ? EACH : given.slices / given.group_size; }
  i64 row_of(i64 member) const { return group[member] * given.entries + entry; }
  i64 slice(i64 sender, i64 receiver) const {
    return row_of(sender) * given.slices + receiver * each();
  }
  char* target(i64 member) const {
    return reinterpret_cast<char*>(given.target) + row_of(member) * given.target_rows * given.row;
  }
  const char* part(u64 array, i64 pitch, i64 rows, i64 member) const {
    return reinterpret_cast<const char*>(array) + group[member] * pitch + entry * rows * given.row;
  }

  // What is known of each receiver: where its rows received so far end, and how many they are.
  struct Found {
    U end[RECEIVERS], total[RECEIVERS], wrong[RECEIVERS];
  };

  // Whether all slices are right, and each receiver's lie one behind the other. `gaps`: whether
  // there are rows that none of them writes.
  bool check(bool& gaps) const {
    Found found = {};
    for (i64 block = 0; block < given.slices; block += RECEIVERS) {
      if (EACH == 1 && count == RECEIVERS && given.slices - block >= RECEIVERS) {
        check_block<true>(found, block);
      } else {
        check_block<false>(found, block);
      }
    }
    U wrong = 0;
    gaps = false;
    for (i64 j = 0; j < count; ++j) {
      wrong |= found.wrong[j];
      gaps |= static_cast<i64>(found.total[j]) != given.target_rows;
    }
    return !wrong;
  }

  // Some slices of each receiver, counted by sender. FULL: as many as there are receivers.
  // Only inlined does the compiler know that nothing else refers to `found`, and use vectors.
  template <bool FULL>
  __attribute__((always_inline)) void check_block(Found& found, i64 block) const {
    const i64 rest = given.slices - block, receivers = FULL ? RECEIVERS : count;
    const i64 slices = FULL || rest > RECEIVERS ? RECEIVERS : rest;
    const U source_rows = limit(given.source_rows), target_rows = limit(given.target_rows);
    U expected[RECEIVERS][RECEIVERS], wrong[RECEIVERS] = {};
    for (i64 j = 0; j < receivers; ++j) {
      const U* const from = received + row_of(first + j) * given.slices + block;
      for (i64 i = 0; i < slices; ++i) expected[i][j] = from[i];
    }
    i64 sender = block / each(), k = block % each();
    for (i64 i = 0; i < slices; ++i) {
      const i64 at = slice(sender, first) + k;
      for (i64 j = 0; j < receivers; ++j) {
        const U size = sizes[at + j * each()], from = offsets[at + j * each()],
                to = starts[at + j * each()];
        wrong[j] |= (size != expected[i][j]) | (size > source_rows) | (size > target_rows) |
                    (from > source_rows - size) | (to > target_rows - size) |
                    ((size != 0) & (to < found.end[j]));
        found.end[j] = size ? to + size : found.end[j];
        found.total[j] += size;
      }
      if (++k < each()) continue;
      ++sender;
      k = 0;
    }
    for (i64 j = 0; j < receivers; ++j) found.wrong[j] |= wrong[j];
  }

  // Another thread may change the arguments after they are checked: rows are written and read
  // within the arrays all the same.

  // The rows that are not received, and some that are copied after them.
  void keep_rest(i64 receiver) const {
    const U rows = limit(given.target_rows);
    char* const to = target(receiver);
    const char* const from = part(given.output, given.output_pitch, given.target_rows, receiver);
    i64 end = 0;
    const auto keep = [&](i64 start) {
      __builtin_memcpy(to + end * given.row, from + end * given.row,
                       static_cast<u64>((start - end) * given.row));
    };
    for (i64 sender = 0; sender < given.group_size; ++sender) {
      const i64 at = slice(sender, receiver);
      for (i64 k = at; k < at + each(); ++k) {
        const U start = least(starts[k], rows);
        if (end < static_cast<i64>(start)) keep(start);
        end = static_cast<i64>(start + least(sizes[k], rows - start));
      }
    }
    keep(given.target_rows);
  }

  // The slices that N members receive, from `receiver` on.
  template <int N>
  void copy(i64 receiver) const {
    const U source_rows = limit(given.source_rows), target_rows = limit(given.target_rows);
    char* to[N];
    for (int j = 0; j < N; ++j) to[j] = target(receiver + j);
    for (i64 sender = 0; sender < given.group_size; ++sender) {
      const char* const from = part(given.source, given.source_pitch, given.source_rows, sender);
      for (i64 k = 0; k < each(); ++k) {
        const i64 at = slice(sender, receiver) + k;
        _Pragma("clang loop unroll(full)")
        for (int j = 0; j < N; ++j) {
          const U rows = least(sizes[at + j * each()], least(source_rows, target_rows));
          const i64 size = rows * given.row;
          char* const start =
              to[j] + least(starts[at + j * each()], target_rows - rows) * given.row;
          const char* const begin =
              from + least(offsets[at + j * each()], source_rows - rows) * given.row;
          if (size == sizeof(Line)) {
            Line line;
            __builtin_memcpy(&line, begin, sizeof line);
            __builtin_memcpy(start, &line, sizeof line);
          } else {
            move(start, begin, size, given.streams);
          }
        }
      }
    }
  }

  void run() const {
    bool gaps;
    if (!check(gaps)) {
      *reinterpret_cast<i64*>(given.fault) = 1;
      return;
    }
    for (i64 j = 0; gaps && j < count; ++j) keep_rest(first + j);
    i64 j = 0;
    for (; j + STREAMS <= count; j += STREAMS) copy<STREAMS>(first + j);
    for (; j < count; ++j) copy<1>(first + j);
  }
};

// Receivers first to last: they are counted by group, entry and member.
template <class U>
inline void exchange(const Exchange& given, i64 first, i64 last) {
  for (i64 count; first < last; first += count) {
    const i64 member = first % given.group_size, at = first / given.group_size;
    const i64* const group =
        reinterpret_cast<const i64*>(given.members) + at / given.entries * given.group_size;
    const i64 rest = given.group_size - member;
    count = rest < last - first ? rest : last - first;
    count = count < RECEIVERS ? count : RECEIVERS;
    if (given.slices == given.group_size) {
      Receivers<U, 1>{given, group, at % given.entries, member, count}.run();
    } else {
      Receivers<U, 0>{given, group, at % given.entries, member, count}.run();
    }
  }
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
EXPORTED void exchange_int(const Exchange* given, i64 first, i64 last) {
  exchange<u32>(*given, first, last);
}
EXPORTED void exchange_long(const Exchange* given, i64 first, i64 last) {
  exchange<u64>(*given, first, last);
}
EXPORTED u64 bytes() { return sizeof(Addition) + sizeof(Chain) + sizeof(Exchange); }
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
