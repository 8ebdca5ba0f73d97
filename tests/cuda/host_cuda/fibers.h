// The threads of a block as fibers, for kernels with barriers: one runs at a time, up to its next one.
#pragma once

#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

struct Fibers {
  enum State : char { READY, AT_BLOCK, AT_WARP, DONE };
  jmp_buf scheduler, at[1024];
  State state[1024];
  alignas(16) char exchanged[1024][16];
  unsigned int current;
};
static Fibers fibers;
inline void wait_as(Fibers::State state) {
  fibers.state[fibers.current] = state;
  if (!_setjmp(fibers.at[fibers.current])) _longjmp(fibers.scheduler, 1);
}
inline void __syncthreads() { wait_as(Fibers::AT_BLOCK); }
inline void __syncwarp(unsigned int = ~0u) { wait_as(Fibers::AT_WARP); }
template <class T>
inline T shuffle(T value, unsigned int lane) {
  static_assert(sizeof(T) <= 16, "");
  memcpy(fibers.exchanged[fibers.current], &value, sizeof value);
  __syncwarp();
  T found;
  memcpy(&found, fibers.exchanged[fibers.current / 32 * 32 + lane], sizeof found);
  __syncwarp();
  return found;
}
inline int __all_sync(unsigned int, int holds) {
  fibers.exchanged[fibers.current][0] = holds != 0;
  __syncwarp();
  int all = 1;
  for (int lane = 0; lane < 32; ++lane) all &= fibers.exchanged[fibers.current / 32 * 32 + lane][0];
  __syncwarp();
  return all;
}
template <class T>
inline T __shfl_sync(unsigned int, T value, int source, int width = 32) {
  unsigned int lane = fibers.current % 32;
  return shuffle(value, lane / width * width + source % width);
}
template <class T>
inline T __shfl_xor_sync(unsigned int, T value, int mask, int width = 32) {
  unsigned int lane = fibers.current % 32, source = lane ^ mask;
  return shuffle(value, source / width > lane / width ? lane : source);
}
template <class T>
inline T __shfl_down_sync(unsigned int, T value, unsigned int delta, int width = 32) {
  unsigned int lane = fibers.current % 32;
  return shuffle(value, lane % width + delta < width ? lane + delta : lane);
}
template <class T>
inline T __shfl_up_sync(unsigned int, T value, unsigned int delta, int width = 32) {
  unsigned int lane = fibers.current % 32;
  return shuffle(value, lane % width >= delta ? lane - delta : lane);
}

static void (*fiber_body)();
inline void run_fiber() {
  fiber_body();
  fibers.state[fibers.current] = Fibers::DONE;
  _longjmp(fibers.scheduler, 1);
}

// Run what is ready; then open the barriers of warps, or the block's.
inline const char* run_block(void (*body)(), char* stacks, size_t stack_size, unsigned int threads) {
  fiber_body = body;
  bool started[1024] = {};
  memset(fibers.state, Fibers::READY, sizeof fibers.state);
  for (;;) {
    static volatile unsigned int thread;
    for (thread = 0; thread < threads; ++thread) {
      if (fibers.state[thread] != Fibers::READY) continue;
      fibers.current = thread;
      threadIdx = {thread % blockDim.x, thread / blockDim.x % blockDim.y,
                   thread / blockDim.x / blockDim.y};
      if (_setjmp(fibers.scheduler)) continue;
      if (started[thread]) _longjmp(fibers.at[thread], 1);
      started[thread] = true;
      static ucontext_t fiber;
      getcontext(&fiber);
      fiber.uc_stack = {stacks + thread * stack_size, 0, stack_size};
      fiber.uc_link = nullptr;
      makecontext(&fiber, run_fiber, 0);
      setcontext(&fiber);
    }
    unsigned int done = 0, waiting = 0, opened = 0;
    for (unsigned int warp = 0; warp < threads; warp += 32) {
      unsigned int end = warp + 32 < threads ? warp + 32 : threads, here = 0, over = 0;
      for (unsigned int lane = warp; lane < end; ++lane) {
        here += fibers.state[lane] == Fibers::AT_WARP;
        over += fibers.state[lane] == Fibers::DONE;
        waiting += fibers.state[lane] == Fibers::AT_BLOCK;
      }
      done += over;
      if (!here || here + over < end - warp) continue;
      ++opened;
      for (unsigned int lane = warp; lane < end; ++lane) {
        if (fibers.state[lane] == Fibers::AT_WARP) fibers.state[lane] = Fibers::READY;
      }
    }
    if (done == threads) return nullptr;
    if (opened) continue;
    if (done + waiting < threads) return "threads of a block wait at different barriers";
    for (unsigned int one = 0; one < threads; ++one) {
      if (fibers.state[one] == Fibers::AT_BLOCK) fibers.state[one] = Fibers::READY;
    }
  }
}
