// Matrix products of a step: rows of activations, prepared once, times the panels of one or more matrices.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace headrace::VARIANT {

constexpr int kBlockRows = 96;  // rows that stay in the cache while panels pass by
#if HEADRACE_AMX
constexpr int kTileRows = kAmxTiles * kAmxRows;
constexpr int kTileStep = kAmxRows;  // that all tiles but the last are multiples of, if there are so many rows
#else
constexpr int kTileRows = kSums, kTileStep = 1;
struct AmxTiles {};
#endif

// The first of the fewest parts of `left`, none above `most`: all about equally large, since small ones run at a lower rate.
inline int even_part(int64_t left, int most) {
  const int64_t parts = (left + most - 1) / most;
  return static_cast<int>((left + parts - 1) / parts);
}

template <int MR>
void tile_of(const Matrix& matrix, int panel, const Activations& a, int64_t row, int64_t begin, int64_t count, float* out) {
  const int64_t k = matrix.columns;
  const uint8_t* w = matrix.panels + panel * matrix.panel_bytes() + matrix.panel_bytes() * begin / k;
  const int64_t first = begin / kGroup * a.rows + row;  // the group of the row and column
  switch (matrix.format) {
    case kFloat32:
      return float_tile<MR>(reinterpret_cast<const float*>(w), a.floats + row * k + begin, k, count, out);
    case kBFloat16:
      return float_tile<MR>(reinterpret_cast<const Brain*>(w), a.floats + row * k + begin, k, count, out);
    case kFloat16:
      return float_tile<MR>(reinterpret_cast<const uint16_t*>(w), a.floats + row * k + begin, k, count, out);
    case kInt8:
      return int8_tile<MR>(w, a.words.data() + first * kGroup, a.word_scales.data() + first, a.rows, count, out);
    case kInt4:
      return int4_tile<MR>(
          w, a.bytes.data() + first * kGroup, a.byte_scales.data() + first, a.byte_sums.data() + first, a.rows, count, out);
  }
}

// out [rows, 16] of one run of a panel's columns; at most kSums rows.
template <int MR = kSums>
void low_tile(
    const Matrix& matrix, int panel, const Activations& a, int64_t row, int rows, int64_t begin, int64_t count, float* out) {
  if constexpr (MR > 1) {
    if (rows < MR) return low_tile<MR - 1>(matrix, panel, a, row, rows, begin, count, out);
  }
  tile_of<MR>(matrix, panel, a, row, begin, count, out);
}

// The same of any number of rows up to kTileRows.
inline void run_tile(
    const Matrix& matrix, int panel, const Activations& a, int64_t row, int rows, int64_t begin, int64_t count, float* out) {
#if HEADRACE_AMX
  if (rows > kSums && (matrix.format == kInt4 || matrix.format == kInt8)) {
    const uint8_t* w = matrix.panels + panel * matrix.panel_bytes() + matrix.panel_bytes() * begin / matrix.columns;
    const int64_t at = begin / kGroup * a.rows + row;
    if (matrix.format == kInt4) {
      const float *scales = a.byte_scales.data() + at, *sums = a.byte_sums.data() + at;
      return amx_tile(w, a.bytes.data() + at * kGroup, scales, sums, a.rows, count, rows, out);
    }
    const float* scales = a.word_scales.data() + at;
    return amx_tile(w, a.words.data() + at * kGroup, scales, scales, a.rows, count, rows, out);
  }
#endif
  for (int done = 0; done < rows;) {
    const int some = even_part(rows - done, kSums);
    low_tile(matrix, panel, a, row + done, some, begin, count, out + done * kPanel);
    done += some;
  }
}

inline void add_bias(const Matrix& matrix, int panel, int rows, float* out) {
  if (!matrix.bias) return;
  const int width = std::min(kPanel, matrix.rows - panel * kPanel);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < width; ++j) out[i * kPanel + j] += matrix.bias[panel * kPanel + j];
  }
}

inline void add_tile(int rows, const float* x, float* out) {
  for (int i = 0; i < rows * kPanel; i += 8) store(out + i, add(load(out + i), load(x + i)));
}

// out [rows, 16] of a panel, its bias added to the first run; the second half goes to `other` if it is wanted apart.
inline void tile(
    const Matrix& matrix, int panel, const Activations& a, int64_t row, int rows, float* out, float* other = nullptr) {
  const int64_t edges[] = {0, matrix.breaks[0], matrix.breaks[1], matrix.breaks[2], matrix.columns};
  alignas(64) float half[kTileRows * kPanel], run[kTileRows * kPanel];
  float* const second = edges[2] == 0 ? out : other ? other : half;
  bool biased = false;
  for (int i = 0; i < 4; ++i) {
    const int64_t count = edges[i + 1] - edges[i];
    if (count == 0) continue;
    float* to = i < 2 ? out : second;
    const bool more = i % 2 == 1 && edges[i] > edges[i - 1];
    run_tile(matrix, panel, a, row, rows, edges[i], count, more ? run : to);
    if (!biased) add_bias(matrix, panel, rows, to);
    biased = true;
    if (more) add_tile(rows, run, to);
  }
  if (second == half && edges[2] < matrix.columns) add_tile(rows, half, out);
}

// Calls body(unit, row, rows) for every tile of `units` panels (or pairs of panels) and `rows` rows.
template <class F>
void each_tile(int64_t rows, int units, const F& body) {
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  // Several chunks a thread, so that all end at about the same time though one may be slower.
  const int wanted = threads() == 1 ? 1 : static_cast<int>(std::max<int64_t>(1, (8 * threads() + blocks - 1) / blocks));
  const int a_chunk = std::max(1, (units + wanted - 1) / wanted);
  const int chunks = (units + a_chunk - 1) / a_chunk;
  auto one = [&](int chunk) {
    [[maybe_unused]] const AmxTiles tiles;
    const int64_t first = chunk / chunks * int64_t{kBlockRows}, last = std::min(rows, first + kBlockRows);
    const int begin = chunk % chunks * a_chunk, end = std::min(units, begin + a_chunk);
    for (int unit = begin; unit < end; ++unit) {
      for (int64_t row = first; row < last;) {
        const int even = (even_part(last - row, kTileRows) + kTileStep - 1) / kTileStep * kTileStep;
        const int count = static_cast<int>(std::min<int64_t>(even, last - row));
        body(unit, row, count);
        row += count;
      }
    }
  };
  parallel(static_cast<int>(chunks * blocks), one);
}

// out [rows, outputs of all matrices]; where these keep the halves of their products apart, [2, rows, outputs].
inline void multiply(const Activations& a, const Matrix* parts, int count, const float* residual, float* out) {
  const int64_t rows = a.rows;
  int units = 0;
  int64_t stride = 0;
  for (int i = 0; i < count; ++i) {
    units += parts[i].panel_count();
    stride += parts[i].rows;
  }
  each_tile(rows, units, [&](int unit, int64_t row, int tall) {
    const Matrix* matrix = parts;
    int64_t column = 0;
    for (; unit >= matrix->panel_count(); ++matrix) {
      unit -= matrix->panel_count();
      column += matrix->rows;
    }
    alignas(64) float y[kTileRows * kPanel], other[kTileRows * kPanel];
    tile(*matrix, unit, a, row, tall, y, matrix->apart ? other : nullptr);
    const int width = std::min(kPanel, matrix->rows - unit * kPanel);
    for (int i = 0; i < tall; ++i) {
      const int64_t at = (row + i) * stride + column + unit * kPanel;
      if (matrix->apart) std::memcpy(out + rows * stride + at, other + i * kPanel, sizeof(float) * width);
      if (width < kPanel) {
        for (int j = 0; j < width; ++j) out[at + j] = residual ? residual[at + j] + y[i * kPanel + j] : y[i * kPanel + j];
        continue;
      }
      const F16 product = load16(y + i * kPanel);
      store(out + at, residual ? add(load16(residual + at), product) : product);
    }
  });
}

inline void linear(
    const float* x, int64_t rows, const Norm* norm, const Matrix* parts, int count, const float* residual, float* out) {
  static thread_local Activations made;
  Activations& a = made;  // a thread_local of the caller, which other threads read
  prepare(x, rows, norm, parts, count, a);
  multiply(a, parts, count, residual, out);
}

// out = [residual +] down(silu(gate) * up); gate and up are equally large.
inline void mlp(
    const float* x, int64_t rows, const Norm* norm, const Matrix* gate_up, const Matrix* down, const float* residual,
    float* out) {
  static thread_local Activations made, between;
  static thread_local std::vector<float> values;
  Activations &a = made, &b = between;
  const int64_t stride = gate_up[0].rows;
  prepare(x, rows, norm, gate_up, 2, a);
  make_room(rows, down, 1, b);
  const bool rounded = b.in_words || b.in_bytes;
  if (!rounded && static_cast<int64_t>(values.size()) < rows * stride) values.resize(rows * stride);
  float* const floats = values.data();
  b.floats = floats;
  // A group of the columns between is made, and rounded, where its sums are.
  each_tile(rows, static_cast<int>((stride + kGroup - 1) / kGroup), [&](int unit, int64_t row, int tall) {
    alignas(64) float gate[kTileRows * kPanel], up[kTileRows * kPanel], inner[kTileRows][kGroup];
    const int64_t width = std::min<int64_t>(kGroup, stride - unit * kGroup);
    for (int half = 0; half * kPanel < width; ++half) {
      tile(gate_up[0], 2 * unit + half, a, row, tall, gate);
      tile(gate_up[1], 2 * unit + half, a, row, tall, up);
      for (int i = 0; i < tall; ++i) {
        store(inner[i] + half * kPanel, mul(silu(load16(gate + i * kPanel)), load16(up + i * kPanel)));
      }
    }
    for (int i = 0; i < tall; ++i) {
      if (rounded) {
        put_group(inner[i], unit, row + i, b);
      } else {
        std::memcpy(floats + (row + i) * stride + unit * kGroup, inner[i], sizeof(float) * width);
      }
    }
  });
  multiply(b, down, 1, residual, out);
}

}  // namespace headrace::VARIANT
