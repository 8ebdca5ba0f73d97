// machine: any fold with a wire, in one launch: a machine with a stack whose instructions push a member
// or add two values. A value is a block that has one scale, of a few threads or of a thread block, in
// shared memory or in a workspace; or, if there are few and long blocks, of many thread blocks: then a
// launch ends wherever a largest magnitude is needed. QUICK: what is rounded is rounded as by chain.cu.
#include "sending.cuh"

enum Kind { PUSH, ADD, FINISH, STORE };

// PUSH makes value `value` of a member; ADD one of `value` and the one above it.
struct Instruction {
  Kind kind;
  int value, member;
  u64 wire_step, step;  // of the random numbers: of what is sent, and of a sum; 0: it is not rounded
};

template <class S, class C, bool QUICK, int COUNT>
struct Machine {
  typedef typename Bits<C>::Word Word;

  const Sent& sent;
  const Unit unit;
  const Members members;
  C* const memory;  // a column of it
  const int threads;

  __device__ __forceinline__ Part part(i64 pass) const {
    const i64 lanes = sent.lanes ? sent.lanes : blockDim.x;
    return part_of<S, COUNT>(sent, unit, members, unit.chunk + pass * lanes);
  }

  __device__ __forceinline__ C* slot(int value, i64 pass) const {
    return memory + (value * sent.passes + pass) * COUNT * threads;
  }

  __device__ __forceinline__ void get(C (&values)[COUNT], int value, i64 pass) const {
    const C* at = slot(value, pass);
#pragma unroll
    for (int index = 0; index < COUNT; ++index) values[index] = at[index * threads];
  }

  __device__ __forceinline__ void put(const C (&values)[COUNT], int value, i64 pass) const {
    C* at = slot(value, pass);
#pragma unroll
    for (int index = 0; index < COUNT; ++index) at[index * threads] = values[index];
  }

  // Elements beyond the part are zeros.
  __device__ __forceinline__ void read(C (&values)[COUNT], int member, const Part& part) const {
    const char* at = members.at(member, unit.offset + part.index * S::BYTES);
    const Raw<S::BYTES, COUNT> raw =
        load_chunk<S::BYTES, COUNT>(at, S::BYTES, part.from, part.to, part.whole);
#pragma unroll
    for (int index = 0; index < COUNT; ++index) {
      values[index] = static_cast<C>(value_of(S(), raw.code(index)));
    }
  }

  // The unit's largest.
  __device__ __forceinline__ Word exchanged(Word most) const {
    if (sent.lanes) return largest_of_lanes(most, static_cast<int>(sent.lanes));
    __shared__ Word found[32];  // of the block's warps
    most = largest_of_lanes(most, 32);
    if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = most;
    __syncthreads();
    for (int warp = 0; warp < static_cast<int>(blockDim.x / 32); ++warp) {
      most = found[warp] > most ? found[warp] : most;
    }
    __syncthreads();
    return most;
  }

  __device__ __forceinline__ void send(C (&values)[COUNT], Word most, i64 index, u64 step) const {
    if constexpr (QUICK) {
      send_quickly(values, most, sent, sent.rule != UNSCALED);
    } else {
      const C amax = Bits<C>::value(most);
      if constexpr (sizeof(C) == 4) {
        if (sent.wide) {
          send_slowly(values, static_cast<double>(amax), sent, index, step, unit.place);
          return;
        }
      }
      send_slowly(values, amax, sent, index, step, unit.place);
    }
  }

  // To the accumulator.
  __device__ __forceinline__ void round(C (&values)[COUNT], i64 index, bool drawn, u64 step) const {
    if constexpr (QUICK) {
      round_all(values, sent.step, sent.accumulator);
    } else {
      if (sent.step == UNROUNDED) return;
      Stream stream = stream_of(sent, sent.finish.stream, unit.place, step);
#pragma unroll 1
      for (int element = 0; element < COUNT; ++element) {
        const u32 lane = drawn ? stream.lane(place_of(sent, index + element)) : 0u;
        turn(values, round_to_target(values[0], sent.accumulator, drawn, lane));
      }
    }
  }

  // In `largest`, of one instruction.
  __device__ __forceinline__ Word* largest_at(i64 at) const {
    const i64 unit = quotient(static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, sent.lanes);
    return reinterpret_cast<Word*>(sent.largest) + at * sent.rows * sent.units + unit;
  }

  // One instruction, on all chunks of the unit. There is one copy of this code: it is long. False: the
  // launch ends here, and the next one, which `resumes`, finds the largest magnitude in `largest`.
  __device__ __forceinline__ bool execute(const Instruction& todo, i64 at, bool resumes) const {
    const Kind kind = todo.kind;
    const bool sends = kind == PUSH ? sent.at == MEMBERS : kind == ADD ? sent.at == HOPS
                     : kind == STORE && sent.result_sent;
    const int from = kind == ADD && !sent.first_is_sent ? todo.value + 1 : todo.value;
    Word most = resumes && unit.from < unit.to ? *largest_at(at) : 0;
    // First the largest magnitude, if it is needed.
#pragma unroll 1
    for (int phase = sends && sent.rule != UNSCALED && !resumes ? 0 : 1; phase < 2; ++phase) {
#pragma unroll 1
      for (i64 pass = 0; pass < sent.passes; ++pass) {
        const Part here = part(pass);
        C values[COUNT];
        if (kind == PUSH) {
          read(values, todo.member, here);
        } else {
          get(values, from, pass);
        }
        if (phase == 0) {
          const Word next = largest_of(values);
          most = next > most ? next : most;
          continue;
        }
        if (sends) send(values, most, here.index, todo.wire_step);
        // What arrives is rounded to the accumulator, and so are a quotient and a sum.
#pragma unroll 1
        for (int stage = 0; stage < 3 && kind <= ADD; ++stage) {
          bool rounds = stage == 0 && sends;
          if (stage == 1 && kind == PUSH && sent.divides) {
            const C divisor = static_cast<C>(sent.divisor);
#pragma unroll
            for (int element = 0; element < COUNT; ++element) values[element] = values[element] / divisor;
            rounds = true;
          }
          if (stage == 2 && kind == ADD) {
            C kept[COUNT];
            get(kept, 2 * todo.value + 1 - from, pass);
#pragma unroll
            for (int element = 0; element < COUNT; ++element) {
              values[element] = values[element] + kept[element];
            }
          }
          if (stage == 2) rounds = todo.step != 0;
          if (rounds) round(values, here.index, stage == 2 && sent.step_drawn, todo.step);
        }
        if (kind == FINISH) finish_values(values, sent, here.index, unit.place);
        if (kind != STORE) {
          put(values, todo.value, pass);
        } else if (!here.empty()) {
          store_part(values, sent, unit, here);
        }
      }
      if (phase == 0 && sent.largest) {
        most = largest_of_lanes(most, 32);
        const bool more = unit.from < unit.to && threadIdx.x % 32 == 0 && most > *largest_at(at);
        if (more) atomicMax(largest_at(at), most);
        return false;
      }
      if (phase == 0) most = exchanged(most);
    }
    return true;
  }

  // A member's values, as they arrive.
  __device__ __forceinline__ Instruction push(int value, int member) const {
    const u64 number = sent.turned ? sent.members - 1 - member : member;
    return {PUSH, value, member, sent.member_step + number, sent.lone_step};
  }

  __device__ __forceinline__ void run() const {
    const i64 count = sent.instructions ? sent.instructions : 2 * sent.visited - 1;
    int values = static_cast<int>(sent.values);
#pragma unroll 1
    for (i64 at = sent.begin; at < count + 2; ++at) {
      Instruction todo;
      i64 add = 0;  // its number
      if (at >= count) {
        todo = {at == count ? FINISH : STORE, 0, 0, sent.result_step, 0};
      } else if (sent.instructions) {
        const i64 given = entry_of(sent, sent.program, at);
        if (given < 0) add = -given;
        if (!add) todo = push(values, static_cast<int>(given));
      } else {  // a chain: each but the first member is added at once
        add = at & 1 ? 0 : at / 2;
        const int member = unit.start + static_cast<int>((at + 1) / 2);
        if (!add) todo = push(values, around(member, static_cast<int>(sent.members)));
      }
      if (add) {
        --values;
        todo = {ADD, values - 1, 0, static_cast<u64>(add), static_cast<u64>(add)};
      } else {
        ++values;
      }
      if (!execute(todo, at, sent.resumes && at == sent.begin)) return;
    }
  }
};

template <class S, class C, bool QUICK, int COUNT>
__global__ void __launch_bounds__(512, 1) machine(const Sent sent) {
  DYNAMIC_SHARED(C, shared);
  C* memory = shared;
  if (sent.workspace) {
    const i64 each = sent.depth * sent.passes * COUNT * blockDim.x;
    memory = reinterpret_cast<C*>(sent.workspace) + blockIdx.x * each;
  }
  const Machine<S, C, QUICK, COUNT> machine = {sent, unit_of<COUNT>(sent), members_of(sent),
                                               memory + threadIdx.x, static_cast<int>(blockDim.x)};
  machine.run();
}
