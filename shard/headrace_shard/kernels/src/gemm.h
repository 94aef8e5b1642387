// Matrix products of a step: rows of activations, prepared once, times the panels of one or more matrices.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace headrace::VARIANT {

// How a product is cut: rows that stay in the cache while panels pass by, chunks for each thread, so that all end at about
// the same time though one may be slower, the most rows of a tile, and what all tiles but the last are multiples of, if
// there are so many rows.
struct RowTiles {
  static constexpr int kBlockRows = kRowBlock, kChunks = 8;
#if HEADRACE_AMX
  static constexpr int kTileRows = kAmxTiles * kAmxRows, kTileStep = kAmxRows;
  const AmxTiles tiles{{64, 64, 32, 64, 32}, {16, 16, 16, 8, 16}};
#else
  static constexpr int kTileRows = 48, kTileStep = 1;
#endif
};
constexpr int kTileRows = RowTiles::kTileRows;

// The first of the fewest parts of `left`, none above `most`: all about equally large, since small ones run at a lower rate.
inline int even_part(int64_t left, int most) {
  const int64_t parts = (left + most - 1) / most;
  return static_cast<int>((left + parts - 1) / parts);
}

// Panels that are multiplied at once: several of floats, of one format and columns that are cut alike, or else one.
struct Panels {
  int count;
  int next;  // panels from each one to that of the next tile, 0: there is none
  const Matrix* matrices[kFloatPanels];
  int numbers[kFloatPanels];
};

// How many of the panels of `count` matrices a tile takes. Each is a stream from memory, of which one alone is slow; where
// sums are few, many rows would rather have them.
inline int panels_at_once(const Matrix* parts, int count, int64_t rows) {
  constexpr int64_t kManyRows = 16, kFewRows = 3;
  const int64_t tall = rows > kManyRows ? kFloatRows : std::min(rows, kFewRows);
  const int32_t format = parts[0].format;
  const bool alike = std::all_of(parts, parts + count, [&](const Matrix& part) {
    return part.format == format && part.apart == parts[0].apart && std::equal(part.breaks, part.breaks + 3, parts[0].breaks);
  });
  return alike && format != kInt8 && format != kInt4 ? std::min<int>(kFloatPanels, kAllSums / tall) : 1;
}

template <int P = kFloatPanels, int R = kFloatRows>
void low_float_tile(
    int32_t format, int wide, int rows, const uint8_t* const* panels, Ahead ahead, const float* a, int64_t columns,
    int64_t count, bool first, float* out) {
  if constexpr (P > 1) {
    if (wide < P) return low_float_tile<P - 1, R>(format, wide, rows, panels, ahead, a, columns, count, first, out);
  }
  if constexpr (R > 1) {
    if (rows < R) return low_float_tile<P, R - 1>(format, wide, rows, panels, ahead, a, columns, count, first, out);
  }
  if constexpr (P * R <= kAllSums) {
    constexpr int64_t kStride = kTileRows * kPanel;
    if (format == kFloat32) return float_tile<P, R, float>(panels, ahead, a, columns, count, first, out, kStride);
    if (format == kBFloat16) return float_tile<P, R, Brain>(panels, ahead, a, columns, count, first, out, kStride);
    float_tile<P, R, uint16_t>(panels, ahead, a, columns, count, first, out, kStride);
  }
}

// out [panels, kTileRows, 16] of one run of columns of panels of floats. Some columns at a time: those stay in the nearest
// cache for all rows, whose tiles together read the next ones ahead. Few rows leave nothing for the cache to keep: for them
// panels are streams.
inline void run_floats(
    const Panels& panels, const Activations& a, int64_t row, int rows, int64_t begin, int64_t count, float* out) {
  const Matrix& matrix = *panels.matrices[0];
  const int64_t bytes = matrix.panel_bytes(), column_bytes = bytes / matrix.columns;
  const int most = std::min(kFloatRows, kAllSums / panels.count), tiles = (rows + most - 1) / most;
  for (int64_t k = begin, some; k < begin + count; k += some) {
    some = std::min(kFloatRun, begin + count - k);
    const uint8_t* w[kFloatPanels];
    for (int i = 0; i < panels.count; ++i) w[i] = panels.matrices[i]->panels + panels.numbers[i] * bytes + k * column_bytes;
    const bool last = k + some == matrix.columns;
    Ahead ahead{some * column_bytes, column_bytes / tiles};
    if (tiles == 1) {
      ahead.bytes = kStreamAhead;
    } else if (last) {
      ahead = panels.next ? Ahead{panels.next * bytes - k * column_bytes, ahead.column_bytes} : Ahead{0, 0};
    }
    for (int done = 0; done < rows;) {
      const int tall = even_part(rows - done, most);
      const float* const x = a.floats + (row + done) * matrix.columns + k;
      low_float_tile(
          matrix.format, panels.count, tall, w, ahead, x, matrix.columns, some, k == begin, out + done * kPanel);
      ahead.bytes += some * ahead.column_bytes;
      done += tall;
    }
  }
}

template <int MR>
void tile_of(const Matrix& matrix, int panel, const Activations& a, int64_t row, int64_t begin, int64_t count, float* out) {
  const int64_t k = matrix.columns;
  const uint8_t* w = matrix.panels + panel * matrix.panel_bytes() + matrix.panel_bytes() * begin / k;
  const int64_t first = begin / kGroup * a.rows + row;  // the group of the row and column
  if (matrix.format == kInt8) {
    return int8_tile<MR>(w, a.words.data() + first * kGroup, a.word_scales.data() + first, a.rows, count, out);
  }
  const float *scales = a.byte_scales.data() + first, *sums = a.byte_sums.data() + first;
  int4_tile<MR>(w, a.bytes.data() + first * kGroup, scales, sums, a.rows, count, out);
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

// The same of any number of rows up to kTileRows, and of all panels.
inline void run_tile(
    const Panels& panels, const Activations& a, int64_t row, int rows, int64_t begin, int64_t count, float* out) {
  const Matrix& matrix = *panels.matrices[0];
  const int panel = panels.numbers[0];
  if (matrix.format != kInt4 && matrix.format != kInt8) return run_floats(panels, a, row, rows, begin, count, out);
#if HEADRACE_AMX
  if (rows > kSums) {  // as in_tiles has it: no tile of a block with more rows than that has fewer
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

inline void add_to(int size, const float* x, float* out) {
  for (int i = 0; i < size; i += kPanel) store(out + i, add(load16(out + i), load16(x + i)));
}

// Sums over the runs of a matrix's columns, each of which run(begin, count, to) gives, in their order. bias(to) adds to the
// first one, add_up(from, to) one to another; the second half goes to `other` if it is wanted apart.
template <int kSize, class Run, class Bias, class AddUp>
void in_runs(const Matrix& matrix, float* out, float* other, const Run& run, const Bias& bias, const AddUp& add_up) {
  const int64_t edges[] = {0, matrix.breaks[0], matrix.breaks[1], matrix.breaks[2], matrix.columns};
  alignas(64) float half[kSize], next[kSize];
  float* const second = edges[2] == 0 ? out : other ? other : half;
  bool biased = false;
  for (int i = 0; i < 4; ++i) {
    const int64_t count = edges[i + 1] - edges[i];
    if (count == 0) continue;
    float* const to = i < 2 ? out : second;
    const bool more = i % 2 == 1 && edges[i] > edges[i - 1];
    run(edges[i], count, more ? next : to);
    if (!biased) bias(to);
    biased = true;
    if (more) add_up(next, to);
  }
  if (second == half && edges[2] < matrix.columns) add_up(half, out);
}

using PanelSums = float[kTileRows * kPanel];

// Rows of each panel, its bias added; the second half goes to `other` if it is wanted apart.
inline void tile(
    const Panels& panels, const Activations& a, int64_t row, int rows, PanelSums* out, PanelSums* other = nullptr) {
  in_runs<kFloatPanels * kTileRows * kPanel>(
      *panels.matrices[0], out[0], other ? other[0] : nullptr,
      [&](int64_t begin, int64_t count, float* to) { run_tile(panels, a, row, rows, begin, count, to); },
      [&](float* to) {
        for (int p = 0; p < panels.count; ++p) {
          add_bias(*panels.matrices[p], panels.numbers[p], rows, to + p * kTileRows * kPanel);
        }
      },
      [&](const float* from, float* to) {
        for (int p = 0; p < panels.count; ++p) {
          add_to(rows * kPanel, from + p * kTileRows * kPanel, to + p * kTileRows * kPanel);
        }
      });
}

// Some of the panels, or pairs of panels, of a product.
struct Units {
  int first;
  int count;
  bool more;  // the same thread will have the ones behind them
};

// Calls body(units, row, rows) for every tile of at most `most` of `units` and some of the rows.
template <class Cut, class F>
void each_tile(int64_t rows, int units, int most, const F& body) {
  constexpr int kBlockRows = Cut::kBlockRows, kTileRows = Cut::kTileRows, kTileStep = Cut::kTileStep;
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  const int64_t share = (Cut::kChunks * threads() + blocks - 1) / blocks;
  const int wanted = threads() == 1 ? 1 : static_cast<int>(std::max<int64_t>(1, share));
  const int a_chunk = std::max(1, (units + wanted - 1) / wanted);
  const int chunks = (units + a_chunk - 1) / a_chunk;
  auto one = [&](int chunk) {
    [[maybe_unused]] const Cut cut;
    const int64_t first = chunk / chunks * int64_t{kBlockRows}, last = std::min(rows, first + kBlockRows);
    const int begin = chunk % chunks * a_chunk, end = std::min(units, begin + a_chunk);
    for (int unit = begin, wide; unit < end; unit += wide) {
      wide = even_part(end - unit, most);
      for (int64_t row = first; row < last;) {
        const int even = (even_part(last - row, kTileRows) + kTileStep - 1) / kTileStep * kTileStep;
        const int count = static_cast<int>(std::min<int64_t>(even, last - row));
        body(Units{unit, wide, unit + wide < end}, row, count);
        row += count;
      }
    }
  };
  parallel(static_cast<int>(chunks * blocks), one);
}

// Where a tile goes: from `at` on, rows `stride` apart; halves that are kept apart `plane` apart.
struct Target {
  const float* residual;
  float* out;
  int64_t plane, stride, at;
};

// Writes y [rows, 16] of a panel, and `other` if its matrix keeps the halves apart.
inline void put_tile(const Matrix& matrix, int panel, int rows, const float* y, const float* other, const Target& to) {
  const int width = std::min(kPanel, matrix.rows - panel * kPanel);
  for (int i = 0; i < rows; ++i) {
    const int64_t at = to.at + i * to.stride;
    if (matrix.apart) std::memcpy(to.out + to.plane + at, other + i * kPanel, sizeof(float) * width);
    if (width < kPanel) {
      for (int j = 0; j < width; ++j) {
        to.out[at + j] = to.residual ? to.residual[at + j] + y[i * kPanel + j] : y[i * kPanel + j];
      }
      continue;
    }
    const F16 product = load16(y + i * kPanel);
    store(to.out + at, to.residual ? add(load16(to.residual + at), product) : product);
  }
}

// out [rows, outputs of all matrices]; where these keep the halves of their products apart, the second ones `plane` behind.
inline void multiply(const Activations& a, const Matrix* parts, int count, const float* residual, float* out, int64_t plane) {
  const int64_t rows = a.rows;
  int units = 0;
  int64_t stride = 0;
  for (int i = 0; i < count; ++i) {
    units += parts[i].panel_count();
    stride += parts[i].rows;
  }
  each_tile<RowTiles>(rows, units, panels_at_once(parts, count, rows), [&](Units found, int64_t row, int tall) {
    Panels panels{found.count, found.more ? found.count : 0, {}, {}};
    int64_t columns[kFloatPanels];  // of the result, where the panels' rows begin
    const Matrix* matrix = parts;
    int64_t column = 0;
    for (int p = 0, unit = found.first; p < found.count; ++p, ++unit) {
      for (; unit >= matrix->panel_count(); ++matrix) {
        unit -= matrix->panel_count();
        column += matrix->rows;
      }
      panels.matrices[p] = matrix;
      panels.numbers[p] = unit;
      columns[p] = column + unit * kPanel;
    }
    alignas(64) PanelSums sums[kFloatPanels], other[kFloatPanels];
    tile(panels, a, row, tall, sums, panels.matrices[0]->apart ? other : nullptr);
    for (int p = 0; p < found.count; ++p) {
      put_tile(
          *panels.matrices[p], panels.numbers[p], tall, sums[p], other[p],
          {residual, out, plane, stride, row * stride + columns[p]});
    }
  });
}

inline void linear_of_rows(
    const float* x, int64_t rows, const Norm* norm, const Matrix* parts, int count, const float* residual, float* out,
    int64_t plane) {
  static thread_local Activations made;
  Activations& a = made;  // a thread_local of the caller, which other threads read
  prepare(x, rows, norm, parts, count, a);
  multiply(a, parts, count, residual, out, plane);
}

// out = [residual +] down(silu(gate) * up); gate and up are equally large.
inline void mlp_of_rows(
    const float* x, int64_t rows, const Norm* norm, const Matrix* gate_up, const Matrix* down, const float* residual,
    float* out, int64_t plane) {
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
  const int at_once = panels_at_once(gate_up, 2, rows);
  each_tile<RowTiles>(rows, static_cast<int>((stride + kGroup - 1) / kGroup), 1, [&](Units found, int64_t row, int tall) {
    const int unit = found.first;
    alignas(64) PanelSums sums[4];  // of a panel or two of gate, then of up
    alignas(64) float inner[kTileRows][kGroup];
    const int64_t width = std::min<int64_t>(kGroup, stride - unit * kGroup);
    const int halves = width > kPanel ? 2 : 1;
    for (int i = 0; i < 2 * halves;) {
      Panels panels{std::min(at_once, 2 * halves - i), found.more ? 2 : 0, {}, {}};
      for (int p = 0; p < panels.count; ++p) {
        panels.matrices[p] = gate_up + (i + p) / halves;
        panels.numbers[p] = 2 * unit + (i + p) % halves;
      }
      tile(panels, a, row, tall, sums + i);
      i += panels.count;
    }
    for (int half = 0; half < halves; ++half) {
      const float *gate = sums[half], *up = sums[halves + half];
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
  multiply(b, down, 1, residual, out, plane);
}

}  // namespace headrace::VARIANT
