// What is done to a row of activations before a matrix product: RMS norm, and rounding to integers by groups of 32.
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "simd.h"
#include "types.h"

namespace headrace::VARIANT {

// Activations in the forms that the weights of one product ask for. Integer forms have a scale a group, so that a row
// cut at a multiple of 32 rounds as the whole one does. Theirs are [groups, rows, 32], scales [groups, rows]: the rows of a
// tile lie side by side.
struct Activations {
  int64_t rows;
  const float* floats;          // [rows, columns]
  std::vector<float> normed;    // what `floats` points to if there was a norm
  std::vector<int16_t> words;   // with int8 weights: 16 bits cost no more than 8 here, and lose next to nothing
  std::vector<float> word_scales;
  std::vector<int8_t> bytes;    // with int4 weights
  std::vector<float> byte_scales;
  std::vector<float> byte_sums; // scale times the sum of the group, for the weights' minima
};

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

// One row; `stride` is what lies between its groups, in groups.
inline void round_row_to_words(const float* x, int64_t columns, int64_t stride, int16_t* out, float* scales) {
  int32_t whole[kGroup];
  for (int64_t k = 0; k < columns; k += kGroup, out += stride * kGroup, scales += stride) {
    const float most = group_largest(x + k);
    *scales = most / 32767.0f;
    round_group(x + k, most > kTiny ? 32767.0f / most : 0.0f, whole);
    for (int i = 0; i < kGroup; ++i) out[i] = static_cast<int16_t>(whole[i]);
  }
}

inline void round_row_to_bytes(const float* x, int64_t columns, int64_t stride, int8_t* out, float* scales, float* sums) {
  int32_t whole[kGroup];
  for (int64_t k = 0; k < columns; k += kGroup, out += stride * kGroup, scales += stride, sums += stride) {
    const float most = group_largest(x + k), scale = most / 127.0f;
    round_group(x + k, most > kTiny ? 127.0f / most : 0.0f, whole);
    int32_t total = 0;
    for (int i = 0; i < kGroup; ++i) {
      out[i] = static_cast<int8_t>(whole[i]);
      total += whole[i];
    }
    *scales = scale;
    *sums = scale * static_cast<float>(total);
  }
}

// Fills `made` for a product of x [rows, columns] with the matrices of `parts`.
inline void prepare(
    const float* x, int64_t rows, int64_t columns, const Norm* norm, const Matrix* parts, int count, Activations& made) {
  bool formats[kFormats] = {};
  for (int i = 0; i < count; ++i) formats[parts[i].format] = true;
  const int64_t groups = columns / kGroup;
  made.rows = rows;
  auto room = [](auto& buffer, int64_t size) {
    if (static_cast<int64_t>(buffer.size()) < size) buffer.resize(size);
  };
  if (norm) room(made.normed, rows * columns);
  made.floats = norm ? made.normed.data() : x;
  if (formats[kInt8]) {
    room(made.words, rows * columns);
    room(made.word_scales, rows * groups);
  }
  if (formats[kInt4]) {
    room(made.bytes, rows * columns);
    room(made.byte_scales, rows * groups);
    room(made.byte_sums, rows * groups);
  }
  if (!norm && !formats[kInt8] && !formats[kInt4]) return;
  // A few rows are done sooner than another thread has noticed them, and rows in one cache line are one thread's.
  constexpr int64_t kLine = 16;
  const int64_t a_chunk = std::max<int64_t>(kLine, (rows / (4 * threads()) + kLine - 1) / kLine * kLine);
  parallel(static_cast<int>((rows + a_chunk - 1) / a_chunk), [&](int chunk) {
    for (int64_t i = chunk * a_chunk; i < std::min(rows, (chunk + 1) * a_chunk); ++i) {
      if (norm) norm_row(x + i * columns, *norm, columns, made.normed.data() + i * columns);
      const float* row = made.floats + i * columns;
      if (formats[kInt8]) {
        round_row_to_words(row, columns, rows, made.words.data() + i * kGroup, made.word_scales.data() + i);
      }
      if (formats[kInt4]) {
        round_row_to_bytes(
            row, columns, rows, made.bytes.data() + i * kGroup, made.byte_scales.data() + i, made.byte_sums.data() + i);
      }
    }
  });
}

}  // namespace headrace::VARIANT
