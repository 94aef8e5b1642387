// Matrix products of a step: rows of activations, prepared once, times the panels of one or more matrices.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace headrace::VARIANT {

constexpr int kTileRows = 6;    // as many as the registers hold sums for
constexpr int kBlockRows = 96;  // rows that stay in the cache while panels pass by

template <int MR>
void tile_of(const Matrix& matrix, int panel, const Activations& a, int64_t row, float* out) {
  const int64_t k = matrix.columns, groups = k / kGroup;
  const uint8_t* w = matrix.panels + panel * matrix.panel_bytes();
  switch (matrix.format) {
    case kFloat32:
      return float_tile<MR>(reinterpret_cast<const float*>(w), a.floats + row * k, k, out);
    case kBFloat16:
      return float_tile<MR>(reinterpret_cast<const Brain*>(w), a.floats + row * k, k, out);
    case kFloat16:
      return float_tile<MR>(reinterpret_cast<const uint16_t*>(w), a.floats + row * k, k, out);
    case kInt8:
      return int8_tile<MR>(w, a.words.data() + row * k, a.word_scales.data() + row * groups, k, out);
    case kInt4:
      return int4_tile<MR>(
          w, a.bytes.data() + row * k, a.byte_scales.data() + row * groups, a.byte_sums.data() + row * groups, k, out);
  }
}

// out [rows, 16] of a panel, its bias added.
inline void tile(const Matrix& matrix, int panel, const Activations& a, int64_t row, int rows, float* out) {
  switch (rows) {
    case 1: tile_of<1>(matrix, panel, a, row, out); break;
    case 2: tile_of<2>(matrix, panel, a, row, out); break;
    case 3: tile_of<3>(matrix, panel, a, row, out); break;
    case 4: tile_of<4>(matrix, panel, a, row, out); break;
    case 5: tile_of<5>(matrix, panel, a, row, out); break;
    default: tile_of<6>(matrix, panel, a, row, out); break;
  }
  if (!matrix.bias) return;
  const int width = std::min(kPanel, matrix.rows - panel * kPanel);
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < width; ++j) out[i * kPanel + j] += matrix.bias[panel * kPanel + j];
  }
}

// Rows of the next tile when `left` remain: no tile of one or two rows beside full ones, they run at half the rate.
inline int tile_rows(int64_t left) {
  if (left == 7 || left == 8) return 4;
  if (left == 9) return 5;
  return static_cast<int>(std::min<int64_t>(left, kTileRows));
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
    const int64_t first = chunk / chunks * int64_t{kBlockRows}, last = std::min(rows, first + kBlockRows);
    const int begin = chunk % chunks * a_chunk, end = std::min(units, begin + a_chunk);
    for (int unit = begin; unit < end; ++unit) {
      for (int64_t row = first; row < last;) {
        const int count = tile_rows(last - row);
        body(unit, row, count);
        row += count;
      }
    }
  };
  parallel(static_cast<int>(chunks * blocks), one);
}

inline void linear(
    const float* x, int64_t rows, const Norm* norm, const Matrix* parts, int count, const float* residual, float* out) {
  static thread_local Activations made;
  Activations& a = made;  // a thread_local of the caller, which other threads read
  prepare(x, rows, parts[0].columns, norm, parts, count, a);
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
    alignas(32) float y[kTileRows * kPanel];
    tile(*matrix, unit, a, row, tall, y);
    const int width = std::min(kPanel, matrix->rows - unit * kPanel);
    for (int i = 0; i < tall; ++i) {
      const int64_t at = (row + i) * stride + column + unit * kPanel;
      if (width < kPanel) {
        for (int j = 0; j < width; ++j) out[at + j] = residual ? residual[at + j] + y[i * kPanel + j] : y[i * kPanel + j];
        continue;
      }
      F8 y0 = load(y + i * kPanel), y1 = load(y + i * kPanel + 8);
      store(out + at, residual ? add(load(residual + at), y0) : y0);
      store(out + at + 8, residual ? add(load(residual + at + 8), y1) : y1);
    }
  });
}

// out = [residual +] down(silu(gate) * up); gate and up are equally large.
inline void mlp(
    const float* x, int64_t rows, const Norm* norm, const Matrix* gate_up, const Matrix* down, const float* residual,
    float* out) {
  static thread_local Activations made;
  static thread_local std::vector<float> inner;
  Activations& a = made;
  const int64_t stride = gate_up[0].rows;
  if (static_cast<int64_t>(inner.size()) < rows * stride) inner.resize(rows * stride);
  float* between = inner.data();
  prepare(x, rows, gate_up[0].columns, norm, gate_up, 2, a);
  each_tile(rows, gate_up[0].panel_count(), [&](int unit, int64_t row, int tall) {
    alignas(32) float gate[kTileRows * kPanel], up[kTileRows * kPanel];
    tile(gate_up[0], unit, a, row, tall, gate);
    tile(gate_up[1], unit, a, row, tall, up);
    const int64_t width = std::min<int64_t>(kPanel, stride - unit * kPanel);
    for (int i = 0; i < tall; ++i) {
      float* to = between + (row + i) * stride + unit * kPanel;
      for (int j = 0; j < kPanel; j += 8) {
        F8 y = mul(silu(load(gate + i * kPanel + j)), load(up + i * kPanel + j));
        if (j + 8 <= width) {
          store(to + j, y);
        } else {
          float edge[8];
          store(edge, y);
          for (int64_t rest = j; rest < width; ++rest) to[rest] = edge[rest - j];
        }
      }
    }
  });
  linear(between, rows, nullptr, down, 1, residual, out);
}

}  // namespace headrace::VARIANT
