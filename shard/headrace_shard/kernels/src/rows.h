// What is done to a row of activations before a matrix product: RMS norm, and rounding to integers by groups of 32.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd16.h"
#include "types.h"

namespace headrace::VARIANT {

// Activations in the forms that the weights of one product ask for. Integer forms have a scale a group, so that a row
// cut at a multiple of 32 rounds as the whole one does. Theirs are [groups, rows, 32], scales [groups, rows]: the rows of a
// tile lie side by side.
struct Activations {
  int64_t rows;
  bool in_words;                // for int8 weights: 16 bits cost no more than 8 here, and lose next to nothing
  bool in_bytes;                // for int4 weights
  const float* floats;          // [rows, columns]
  std::vector<float> normed;    // what `floats` points to if there was a norm
  std::vector<int16_t> words;
  std::vector<float> word_scales;
  std::vector<int8_t> bytes;
  std::vector<float> byte_scales;
  std::vector<float> byte_sums; // scale times the sum of the group, for the weights' minima
};

constexpr int64_t kSpareRows = 16;  // behind the last one: AMX reads whole tiles
constexpr int64_t kRowBlock = 96;  // rows that stay in the cache while panels pass by

// Whether AMX multiplies a row of integers.
inline bool in_tiles(int64_t row, int64_t rows) {
#if HEADRACE_AMX
  return std::min(kRowBlock, rows - row / kRowBlock * kRowBlock) > kSums;
#else
  return false;
#endif
}

// Below this a group is zero: its reciprocal would not be finite.
constexpr float kTiny = 1e-30f;

inline void norm_row(const float* x, const Norm& norm, int64_t columns, float* out) {
  F8 a = zero(), b = zero();
  int64_t k = 0;
  for (; k + 16 <= columns; k += 16) {
    F8 v = load(x + k), u = load(x + k + 8);
    a = fma(v, v, a);
    b = fma(u, u, b);
  }
  float squares = sum(add(a, b));
  for (; k < columns; ++k) squares += x[k] * x[k];
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(columns) + norm.epsilon);
  for (k = 0; k + 8 <= columns; k += 8) store(out + k, mul(mul(load(x + k), all(scale)), load(norm.weight + k)));
  for (; k < columns; ++k) out[k] = x[k] * scale * norm.weight[k];
}

inline float group_largest(const float* x) {
  return largest(max(max(abs(load(x)), abs(load(x + 8))), max(abs(load(x + 16)), abs(load(x + 24)))));
}

// 32 values times `scale`, rounded to the nearest whole number, ties to even.
inline void round_group(const float* x, float scale, int32_t* out) {
#if HEADRACE_AVX2
  for (int i = 0; i < kGroup; i += 8)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_cvtps_epi32(mul(load(x + i), all(scale))));
#else
  for (int i = 0; i < kGroup; ++i) {
    float value = std::nearbyint(x[i] * scale);
    out[i] = std::isfinite(value) ? static_cast<int32_t>(value) : 0;  // the scale carries what is not finite
  }
#endif
}

// `apart`: all lower bytes, and behind them all upper ones.
inline void round_to_words(const float* x, bool apart, int16_t* out, float* scale) {
  int32_t whole[kGroup];
  const float most = group_largest(x);
  round_group(x, most > kTiny ? 32767.0f / most : 0.0f, whole);
  uint8_t* bytes = reinterpret_cast<uint8_t*>(out);
  for (int i = 0; i < kGroup; ++i) {
    if (apart) {
      bytes[i] = static_cast<uint8_t>(whole[i]);
      bytes[kGroup + i] = static_cast<uint8_t>(whole[i] >> 8);
    } else {
      out[i] = static_cast<int16_t>(whole[i]);
    }
  }
  *scale = most / 32767.0f;
}

inline void round_to_bytes(const float* x, int8_t* out, float* scale, float* sum) {
  int32_t whole[kGroup];
  const float most = group_largest(x);
  round_group(x, most > kTiny ? 127.0f / most : 0.0f, whole);
  int32_t total = 0;
  for (int i = 0; i < kGroup; ++i) {
    out[i] = static_cast<int8_t>(whole[i]);
    total += whole[i];
  }
  *scale = most / 127.0f;
  *sum = *scale * static_cast<float>(total);
}

// Makes room for the integer forms that a product of `rows` rows with the matrices of `parts` wants.
inline void make_room(int64_t rows, const Matrix* parts, int count, Activations& made) {
  auto room = [](auto& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  };
  auto wanted = [&](Format format) {
    return std::any_of(parts, parts + count, [&](const Matrix& part) { return part.format == format; });
  };
  const int64_t places = rows * (parts[0].columns / kGroup) + kSpareRows;
  made.rows = rows;
  made.in_words = wanted(kInt8);
  made.in_bytes = wanted(kInt4);
  if (made.in_words) {
    room(made.words, places * kGroup);
    room(made.word_scales, places);
  }
  if (made.in_bytes) {
    room(made.bytes, places * kGroup);
    room(made.byte_scales, places);
    room(made.byte_sums, places);
  }
}

// Writes a group of a row, 32 values, in the forms that are wanted.
inline void put_group(const float* x, int64_t group, int64_t row, Activations& made) {
  const int64_t at = group * made.rows + row;
  if (made.in_words) {
    round_to_words(x, in_tiles(row, made.rows), made.words.data() + at * kGroup, made.word_scales.data() + at);
  }
  if (made.in_bytes) {
    round_to_bytes(x, made.bytes.data() + at * kGroup, made.byte_scales.data() + at, made.byte_sums.data() + at);
  }
}

// Fills `made` for a product of x [rows, columns] with the matrices of `parts`.
inline void prepare(const float* x, int64_t rows, const Norm* norm, const Matrix* parts, int count, Activations& made) {
  const int64_t columns = parts[0].columns;
  make_room(rows, parts, count, made);
  if (norm && static_cast<int64_t>(made.normed.size()) < rows * columns) made.normed.resize(rows * columns);
  made.floats = norm ? made.normed.data() : x;
  const int64_t groups = made.in_words || made.in_bytes ? columns / kGroup : 0;
  if (!norm && groups == 0) return;
  // A few rows are done sooner than another thread has noticed them, and rows in one cache line are one thread's.
  constexpr int64_t kLine = 16;
  const int64_t a_chunk = std::max<int64_t>(kLine, (rows / (4 * threads()) + kLine - 1) / kLine * kLine);
  parallel(static_cast<int>((rows + a_chunk - 1) / a_chunk), [&](int chunk) {
    for (int64_t i = chunk * a_chunk; i < std::min(rows, (chunk + 1) * a_chunk); ++i) {
      if (norm) norm_row(x + i * columns, *norm, columns, made.normed.data() + i * columns);
      for (int64_t g = 0; g < groups; ++g) put_group(made.floats + i * columns + g * kGroup, g, i, made);
    }
  });
}

}  // namespace headrace::VARIANT
