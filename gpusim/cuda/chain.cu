// chain: a fold with a wire that visits the members in sequence, in one launch. A thread keeps the
// totals of a chunk in registers, and loads coming members while it adds earlier ones. The blocks with
// one scale are those of at most a warp: its threads exchange their largest magnitudes. Wires and
// accumulators are plain formats, rounded to nearest: machine.cu has the others.
#include "sending.cuh"

template <class S, int COUNT>
__device__ __forceinline__ void values_of(const Raw<S::BYTES, COUNT>& raw, float (&values)[COUNT]) {
#pragma unroll
  for (int index = 0; index < COUNT; ++index) {
    values[index] = static_cast<float>(value_of(S(), raw.code(index)));
  }
}

// ROUNDS: whether sums are rounded to an accumulator.
template <class S, bool SCALED, bool ROUNDS, int COUNT>
struct Total {
  const Sent& sent;
  bool idle;  // it has no elements, and takes part in the exchanges
  float values[COUNT];

  __device__ __forceinline__ void send(float (&sends)[COUNT]) {
    u32 most = 0;
    if constexpr (SCALED) {
      most = largest_of_lanes(idle ? 0u : largest_of(sends), static_cast<int>(sent.lanes));
    }
    send_quickly(sends, most, sent, SCALED);
  }

  // The total goes to the next member; or the member to where the total is.
  __device__ __forceinline__ void add(const float (&next)[COUNT], bool first) {
    const bool hops = sent.at == HOPS;
    float sends[COUNT];
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      sends[index] = hops ? values[index] : next[index];
      values[index] = hops || first ? next[index] : values[index];
    }
    if (hops && first) return;
    send(sends);
    if constexpr (ROUNDS) round_all(sends, sent.step, sent.accumulator);
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      values[index] = first ? sends[index] : sends[index] + values[index];
    }
    if constexpr (ROUNDS) round_all(values, sent.step, sent.accumulator);
  }

  template <int AHEAD>
  __device__ __forceinline__ void add_all(const Chain& chain, int start) {
#pragma unroll 1
    for (int seen = 0; seen < chain.count; seen += AHEAD) {
      const int rest = chain.count - seen;
      Raw<S::BYTES, COUNT> raw[AHEAD];
      read_batch<S>(raw, chain, around(start + seen, chain.count), idle ? 0 : rest);
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        if (ahead >= rest) continue;
        float next[COUNT];
        values_of<S>(raw[ahead], next);
        add(next, ahead == 0 && seen == 0);
      }
    }
  }
};

template <class S, bool SCALED, bool ROUNDS, int COUNT, int AHEAD>
__global__ void __launch_bounds__(256, 3) chain(const Sent sent) {
  const Unit unit = unit_of<COUNT>(sent);
  const Members members = members_of(sent);
  const Part part = part_of<S, COUNT>(sent, unit, members, unit.chunk);
  Chain chain = {members, S::BYTES, unit.offset + part.index * S::BYTES, 0, 0,
                 static_cast<int>(sent.members), part.from, part.to, false};
  Total<S, SCALED, ROUNDS, COUNT> total = {sent, part.empty(), {}};
  // Threads of a warp go one way.
  if (__all_sync(0xffffffffu, part.whole || part.empty())) {
    chain.whole = true;
    total.template add_all<AHEAD>(chain, unit.start);
  } else {
    chain.whole = part.whole;
    total.template add_all<1>(chain, unit.start);
  }
  finish_values(total.values, sent, part.index, unit.place);
  if (sent.result_sent) total.send(total.values);
  if (!part.empty()) store_part(total.values, sent, unit, part);
}
