// ragged copy: segments of rows, of any lengths, in one launch; and the launches before it, which
// check the segments and find where each block begins.
// All rows that move are numbered; threads share them out evenly, whatever segment they are in.
#include "formats.cuh"

struct Rows {
  u64 base;     // of replica 0, where no table is given
  u64 table;    // the replicas' addresses, or 0
  i64 stride;   // bytes from replica to replica, where no table is given
  i64 pitch;    // bytes from row to row
  i64 replicas;
  u64 counts;   // the address of each replica's number of rows, or 0: all have `count`
  i64 count;
};

struct Ragged {
  Rows source, destination;
  u64 segments;  // (S, 5) integers of 64 bits: source, its row, destination, its row, rows
  u64 ends;      // (S,): the number of rows in this and all earlier segments
  u64 order;     // (S,): segments by destination and its row, for the check of overlaps
  u64 fault;     // one word: the least 2 * segment that leaves its arrays, + 1: that overlaps
  i64 count;     // S
  i64 row_units, units;  // of one row, and of all that move
  u64 tiles;     // (tiles + 1, 2): the segment and the row of each tile's first unit
};

const int THREADS = 256;  // of a block

__device__ __forceinline__ char* row_at(const Rows& rows, i64 replica, i64 row) {
  u64 base = rows.table ? __ldg(reinterpret_cast<const u64*>(rows.table) + replica)
                        : rows.base + static_cast<u64>(replica * rows.stride);
  return reinterpret_cast<char*>(base) + row * rows.pitch;
}

__device__ __forceinline__ bool inside(const Rows& rows, i64 replica, i64 row, i64 length) {
  if (replica < 0 || replica >= rows.replicas || row < 0 || length < 0) return false;
  i64 count = rows.counts ? __ldg(reinterpret_cast<const i64*>(rows.counts) + replica) : rows.count;
  return row <= count && length <= count - row;  // a sum could overflow
}

__global__ void __launch_bounds__(THREADS) ragged_check(const Ragged ragged) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread >= ragged.count) return;
  const i64* segments = reinterpret_cast<const i64*>(ragged.segments);
  u64* fault = reinterpret_cast<u64*>(ragged.fault);
  const i64* mine = segments + 5 * thread;
  if (!inside(ragged.source, mine[0], mine[1], mine[4]) ||
      !inside(ragged.destination, mine[2], mine[3], mine[4])) {
    atomicMin(fault, 2 * static_cast<u64>(thread));
  }
  if (thread + 1 == ragged.count) return;
  const i64* order = reinterpret_cast<const i64*>(ragged.order);
  const i64* before = segments + 5 * order[thread];
  const i64* after = segments + 5 * order[thread + 1];
  // A segment that overlaps any other overlaps its neighbour in this order.
  if (before[2] == after[2] && after[3] - before[3] < before[4]) {
    atomicMin(fault, 2 * static_cast<u64>(order[thread + 1]) + 1);
  }
}

// The first segment that ends behind `row`, known to lie in low..high.
__device__ __forceinline__ i64 segment_of(const i64* ends, i64 row, i64 low, i64 high) {
  while (low < high) {
    i64 middle = (low + high) >> 1;
    if (__ldg(ends + middle) > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// A thread for each tile, and one for the end: the bisection over all segments, and the division of
// 64 bits, are done once for all threads of the tile's block.
template <int UNITS>
__global__ void __launch_bounds__(THREADS) ragged_tiles(const Ragged ragged) {
  const i64 thread = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const i64 unit = thread * (THREADS * UNITS);
  if (unit >= ragged.units + THREADS * UNITS) return;
  i64* tile = reinterpret_cast<i64*>(ragged.tiles) + 2 * thread;
  const i64 row = unit / ragged.row_units;
  tile[0] = segment_of(reinterpret_cast<const i64*>(ragged.ends), row, 0, ragged.count - 1);
  tile[1] = row;
}

template <class Unit>
struct Move {
  const Unit* from;
  Unit* to;
};

// Unit `within` of the rows from `row` on, which segment `low` or a later one, up to `high`, holds.
template <class Unit>
__device__ __forceinline__ Move<Unit> move_of(const Ragged& ragged, i64 row, i64 within, i64 low,
                                              i64 high) {
  if (within >= ragged.row_units) {
    const i64 rows = (within | ragged.row_units) >> 32 == 0
                         ? static_cast<u32>(within) / static_cast<u32>(ragged.row_units)
                         : within / ragged.row_units;
    row += rows;
    within -= rows * ragged.row_units;
  }
  const i64* ends = reinterpret_cast<const i64*>(ragged.ends);
  i64 segment = segment_of(ends, row, low, high);
  const i64* five = reinterpret_cast<const i64*>(ragged.segments) + 5 * segment;
  i64 left = __ldg(ends + segment) - row;  // rows of the segment from this one on
  i64 place = __ldg(five + 4) - left;
  const char* from = row_at(ragged.source, __ldg(five), __ldg(five + 1) + place);
  char* to = row_at(ragged.destination, __ldg(five + 2), __ldg(five + 3) + place);
  return {reinterpret_cast<const Unit*>(from) + within, reinterpret_cast<Unit*>(to) + within};
}

// A block moves a tile, UNITS units for each of its threads: neighbours move neighbouring units, and
// each thread has all its loads under way before it stores.
template <class Unit, int UNITS>
__global__ void __launch_bounds__(THREADS) ragged_copy(const Ragged ragged) {
  const i64* tiles = reinterpret_cast<const i64*>(ragged.tiles) + 2 * static_cast<i64>(blockIdx.x);
  const i64 low = __ldg(tiles), row = __ldg(tiles + 1), high = __ldg(tiles + 2);
  const i64 tile = static_cast<i64>(blockIdx.x) * (THREADS * UNITS);
  const i64 within = tile - row * ragged.row_units;  // the tile's first unit, in its row
  Unit held[UNITS];
  Unit* to[UNITS];
#pragma unroll
  for (int index = 0; index < UNITS; ++index) {
    const int unit = threadIdx.x + index * THREADS;  // in the tile
    to[index] = nullptr;
    if (tile + unit >= ragged.units) continue;
    Move<Unit> move = move_of<Unit>(ragged, row, within + unit, low, high);
    held[index] = __ldg(move.from);
    to[index] = move.to;
  }
#pragma unroll
  for (int index = 0; index < UNITS; ++index) {
    if (to[index]) *to[index] = held[index];
  }
}
