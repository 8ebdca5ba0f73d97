// Loops over the elements of a tile: without branches, for vectors.
#pragma once

#include "cuda_on_cpu.h"
#include "fold.cuh"

// Elements of a loop do not depend on each other: what it writes may be what it reads.
#define FOR_EACH(k, count) \
  _Pragma("clang loop vectorize(assume_safety)") for (i64 k = 0; k < (count); ++k)

// Random numbers of a tile, of whose elements build.py gives the number: whole blocks, eight of
// them at once.
const int LANES = TILE + 8 + 64;

// Elements of one row, side by side in the value and in the output.
struct Tile {
  i64 index;   // of the first, in the whole value
  int count;   // of elements, at most TILE
  i64 offset;  // bytes from a member's address to the first
  i64 place;   // elements from the output's address to the first
  i64 entry;   // the batch entry
};

template <bool CHOICE, class A, class B>
struct Choose {
  typedef A type;
};
template <class A, class B>
struct Choose<false, A, B> {
  typedef B type;
};

typedef _Float16 Half;
