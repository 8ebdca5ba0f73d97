// Folds whose partial sums or members are rounded to a wire: docs/numerics.md, "On the wire".
#pragma once

#include "reading.h"
#include "rounders.h"

// What is sent before an addition: the value at its left, as in chains, that at its right, as in
// trees, or each member.
enum Sends { NOTHING, LEFT, RIGHT, MEMBERS };

// All members have 8 bytes, as those of Fold.
struct SentFold {
  Fold fold;
  Target wire;
  i64 turned;       // whether the last member comes first
  i64 at_result;    // whether the result is sent too
  Finish received;  // how it is rounded to the output's format again
};

struct Sending {
  const Rounder& wire;
  const bool turned;
};

// A value that arrives, or a sum, as the accumulator of a STEP has it, to nearest.
template <int STEP, class C>
inline C held(C value) {
  return rounded<STEP, false>(value, 0);
}

// An operand's elements as they arrive.
template <int STEP, int WIRE, bool DRAWN, class Operand>
struct Arriving {
  Operand operand;
  ToFormat<WIRE, DRAWN> wire;
  const u32* lanes;

  inline auto operator[](int index) const {
    if constexpr (WIRE == EXACT) {
      return operand[index];
    } else {
      return held<STEP>(wire(operand[index], DRAWN ? lanes[index] : 0));
    }
  }
};
