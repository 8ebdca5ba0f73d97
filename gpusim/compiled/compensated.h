// Compensated sums: docs/numerics.md has their operations. A tile has its sums and its compensations
// in the nearest cache, and each member is read once.
#pragma once

#include "tiles.h"

// An element's sum and its compensation; each operation is rounded as STEP says, to nearest.
template <class C, int STEP, bool NEUMAIER>
struct Compensated {
  C total, lost;

  static inline C round(C value) { return rounded<STEP, false>(value, 0); }

  inline void add(C value) {
    C following;
    if constexpr (NEUMAIER) {
      following = round(total + value);
      const bool keeps = __builtin_elementwise_abs(total) >= __builtin_elementwise_abs(value);
      const C large = keeps ? total : value, small = keeps ? value : total;
      lost = round(lost + round(round(large - following) + small));
    } else {
      const C term = round(value - lost);
      following = round(total + term);
      lost = round(round(following - total) - term);
    }
    lost = lost - lost == 0 ? lost : static_cast<C>(0);
    total = following;
  }

  inline C result() const {
    if constexpr (!NEUMAIER) return total;
    const C sum = round(total + lost);
    return lost == 0 ? total : sum;  // -0 stays
  }
};

template <class S, class C, int STEP, bool NEUMAIER>
struct CompensatedTile {
  typedef Compensated<C, STEP, NEUMAIER> Sum;
  const Job<S, C, STEP, false>& job;
  C *total, *lost;

  // COUNT members from this one on. FIRST: nothing comes before them.
  template <int COUNT, bool FIRST>
  inline void add(int start) const {
    const int count = job.tile.count;
    Codes<S, C> rows[COUNT];
    for (int n = 0; n < COUNT; ++n) rows[n] = job.codes_of(start + n);
    FOR_EACH(k, count) {
      Sum sum = {FIRST ? static_cast<C>(rows[0][k]) : total[k], FIRST ? static_cast<C>(0) : lost[k]};
#pragma unroll
      for (int n = FIRST; n < COUNT; ++n) sum.add(static_cast<C>(rows[n][k]));
      total[k] = sum.total;
      lost[k] = sum.lost;
    }
  }

  // Members whose elements do not lie side by side, one after the other.
  void add_each() const {
    const int count = job.tile.count, members = static_cast<int>(job.fold.layout.members);
    alignas(64) C values[TILE];
    job.load_member(total, 0);
    FOR_EACH(k, count) lost[k] = 0;
    for (int member = 1; member < members; ++member) {
      job.load_member(values, member);
      FOR_EACH(k, count) {
        Sum sum = {total[k], lost[k]};
        sum.add(values[k]);
        total[k] = sum.total;
        lost[k] = sum.lost;
      }
    }
  }
};

template <class S, class C, int STEP, bool NEUMAIER>
inline void compensated_tiles(const Fold& fold, i64 part, i64 parts, void*) {
  const Rounder step(fold.accumulator), last(fold.finish.target);
  for_tiles(fold.layout, part, parts, [&](const Tile& tile) {
    alignas(64) C total[TILE];
    alignas(64) C lost[TILE];
    u32 buffer[LANES];
    const Job<S, C, STEP, false> job = {fold, step, tile, buffer};
    const CompensatedTile<S, C, STEP, NEUMAIER> sums = {job, total, lost};
    if (fold.layout.stride == S::BYTES) {
      job.in_groups(0, [&sums](auto members, int next, bool first) {
        const int some = members.value;
        first ? sums.template add<some, true>(next) : sums.template add<some, false>(next);
      });
    } else {
      sums.add_each();
    }
    FOR_EACH(k, tile.count) {
      const Compensated<C, STEP, NEUMAIER> sum = {total[k], lost[k]};
      total[k] = sum.result();
    }
    store(total, fold.finish, last, tile, fold.layout.out, buffer);
  });
}
