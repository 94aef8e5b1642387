// Passes over whole rows of logits. A row is cut into pieces of a fixed size, so that its results do not depend on how
// many threads or rows there are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"
#include "simd16.h"
#include "types.h"

namespace headrace::VARIANT {

constexpr int64_t kPiece = 4096;  // columns that fit into the nearest cache
constexpr int64_t kChunk = 64;    // columns whose probabilities are summed before the cumulative sum

struct Logits {
  const float* data;
  int64_t rows, stride, columns;

  int64_t pieces() const { return (columns + kPiece - 1) / kPiece; }
  int64_t chunks() const { return (columns + kChunk - 1) / kChunk; }
  const float* row(int64_t i) const { return data + i * stride; }
};

inline float largest_of(const float* x, int64_t count) {
  F16 most = all16(-INFINITY);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) most = max(load16(x + i), most);  // NaN is passed over
  float value = largest(most);
  for (; i < count; ++i) value = x[i] > value ? x[i] : value;
  return value;
}

// Sum of exp((x - shift) * scale); 0 for -inf.
inline float exp_sum(const float* x, int64_t count, float shift, float scale) {
  F16 total = zero16();
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) total = add(total, exp(mul(sub(load16(x + i), all16(shift)), all16(scale))));
  if (i < count) {
    float rest[16];
    std::fill(rest, rest + 16, -INFINITY);
    std::copy(x + i, x + count, rest);
    total = add(total, exp(mul(sub(load16(rest), all16(shift)), all16(scale))));
  }
  return sum(total);
}

// body(row, piece, first column, columns) for every piece of every row.
template <class F>
void each_piece(const Logits& l, const F& body) {
  const int64_t pieces = l.pieces(), items = l.rows * pieces;
  const int64_t together = std::max<int64_t>(1, items / (16 * threads()));
  parallel(static_cast<int>((items + together - 1) / together), [&](int chunk) {
    for (int64_t i = chunk * together; i < std::min(items, (chunk + 1) * together); ++i) {
      const int64_t begin = i % pieces * kPiece;
      body(i / pieces, i % pieces, begin, std::min(kPiece, l.columns - begin));
    }
  });
}

// best [rows]: the first column with the largest logit. log_sums [rows]: log of the sum of exp; NaN if a logit is.
inline void scan(const float* data, int64_t rows, int64_t stride, int64_t columns, int64_t* best, float* log_sums) {
  const Logits l{data, rows, stride, columns};
  const int64_t pieces = l.pieces();
  std::vector<float> most(rows * pieces), sums(rows * pieces);
  each_piece(l, [&](int64_t row, int64_t piece, int64_t begin, int64_t count) {
    const float* x = l.row(row) + begin;
    const float top = largest_of(x, count);
    most[row * pieces + piece] = top;
    // Where all are -inf, or NaN, the difference below would be NaN: right for NaN only.
    sums[row * pieces + piece] = exp_sum(x, count, top == -INFINITY ? 0.0f : top, 1.0f);
  });
  for (int64_t row = 0; row < rows; ++row) {
    const float *tops = most.data() + row * pieces, *parts = sums.data() + row * pieces;
    const int64_t piece = std::max_element(tops, tops + pieces) - tops;
    const float* x = l.row(row);
    const float *begin = x + piece * kPiece, *end = std::min(begin + kPiece, x + columns);
    const float* found = std::find(begin, end, tops[piece]);
    best[row] = found < end ? found - x : 0;
    double total = 0;
    for (int64_t i = 0; i < pieces; ++i) {
      const float shift = tops[i] == -INFINITY ? 0.0f : tops[i];
      total += parts[i] == 0 ? 0.0 : parts[i] * std::exp(static_cast<double>(shift) - tops[piece]);
    }
    log_sums[row] = static_cast<float>(tops[piece] + std::log(total));
  }
}

// tokens [rows]: the first column at which the cumulative probability of softmax(logits / temperature) passes the row's
// number from [0, 1).
inline void draw(
    const float* data, int64_t rows, int64_t stride, int64_t columns, const float* temperatures, const double* numbers,
    int64_t* tokens) {
  const Logits l{data, rows, stride, columns};
  const int64_t pieces = l.pieces(), chunks = l.chunks();
  std::vector<float> most(rows * pieces), sums(rows * chunks);
  each_piece(l, [&](int64_t row, int64_t piece, int64_t begin, int64_t count) {
    most[row * pieces + piece] = largest_of(l.row(row) + begin, count);
  });
  auto top = [&](int64_t row) { return *std::max_element(&most[row * pieces], &most[row * pieces] + pieces); };
  each_piece(l, [&](int64_t row, int64_t, int64_t begin, int64_t count) {
    const float shift = top(row), scale = 1.0f / temperatures[row];
    for (int64_t at = begin; at < begin + count; at += kChunk) {
      sums[row * chunks + at / kChunk] = exp_sum(l.row(row) + at, std::min(kChunk, columns - at), shift, scale);
    }
  });
  for (int64_t row = 0; row < rows; ++row) {
    const float* parts = sums.data() + row * chunks;
    double total = 0, before = 0;
    for (int64_t i = 0; i < chunks; ++i) total += parts[i];
    const double goal = numbers[row] * total;
    int64_t chunk = 0;
    // Rounding must not run past the last chunk, or column, that has any probability.
    for (int64_t i = 0; i < chunks; ++i) {
      if (parts[i] <= 0) continue;
      chunk = i;
      if (before + parts[i] > goal) break;
      before += parts[i];
    }
    const float shift = top(row), scale = 1.0f / temperatures[row];
    const float* x = l.row(row) + chunk * kChunk;
    int64_t column = 0;
    for (int64_t i = 0; i < std::min(kChunk, columns - chunk * kChunk); ++i) {
      const float p = exp_sum(x + i, 1, shift, scale);
      if (p <= 0) continue;
      column = i;
      if (before + p > goal) break;
      before += p;
    }
    tokens[row] = chunk * kChunk + column;
  }
}

// Of `count` rows of logits, at `places`, those columns become -inf whose bit is 0; bits [count, words], the lowest bit of a
// word first. Columns beyond the bits have none.
inline void mask(
    float* data, const int64_t* places, int64_t count, int64_t stride, int64_t columns, const uint32_t* bits, int64_t words) {
  each_piece({data, count, stride, columns}, [&](int64_t row, int64_t, int64_t begin, int64_t width) {
    float* x = data + places[row] * stride;
    for (int64_t at = begin; at < begin + width; at += 32) {
      const uint32_t word = at / 32 < words ? bits[row * words + at / 32] : 0;
      if (word == ~uint32_t{0}) continue;
      const int64_t end = std::min<int64_t>(32, columns - at);
      for (int64_t i = 0; i < end; ++i) x[at + i] = word >> i & 1 ? x[at + i] : -INFINITY;
    }
  });
}

// Whole numbers that are in the order of the floats; -0 is to be 0.
inline int64_t order_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits >= 0 ? bits : int64_t{INT32_MIN} - bits - 1;
}

inline float float_of(int64_t order) {
  const int32_t bits = static_cast<int32_t>(order >= 0 ? order : int64_t{INT32_MIN} - order - 1);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Sum of the weights of all scores above `bound`.
inline double weight_above(const float* scores, const float* weights, int64_t columns, float bound) {
  double total = 0;
  for (int64_t begin = 0; begin < columns; begin += kPiece) {
    const int64_t end = std::min(columns, begin + kPiece);
    F8 a = zero(), b = zero();
    int64_t i = begin;
    for (; i + 16 <= end; i += 16) {
      a = add(a, zero_unless_above(load(weights + i), load(scores + i), all(bound)));
      b = add(b, zero_unless_above(load(weights + i + 8), load(scores + i + 8), all(bound)));
    }
    float part = sum(add(a, b));
    for (; i < end; ++i) part += scores[i] > bound ? weights[i] : 0.0f;
    total += part;
  }
  return total;
}

// thresholds [rows]: the largest t at which the weights of scores >= t are at least the row's mass, or all there are.
// scores and weights [rows, columns]; no score is NaN, and one of -inf has no weight. By bisection over the floats.
inline void threshold(
    const float* scores, const float* weights, int64_t rows, int64_t columns, const double* masses, float* thresholds) {
  parallel(static_cast<int>(rows), [&](int row) {
    const float *x = scores + row * columns, *w = weights + row * columns;
    int64_t low = order_of(-INFINITY), high = order_of(largest_of(x, columns) + 0.0f) + 1;
    const double goal = std::min(masses[row], weight_above(x, w, columns, -INFINITY));
    while (high - low > 1) {
      const int64_t middle = (low + high) >> 1;
      (weight_above(x, w, columns, float_of(middle - 1)) >= goal ? low : high) = middle;
    }
    thresholds[row] = float_of(low);
  });
}

}  // namespace headrace::VARIANT
