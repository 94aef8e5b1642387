// Values of a checkpoint into panels: in 32 or 16 bits, or rounded to integers by groups of 32 columns.
#pragma once

#include <algorithm>

#include "pool.h"
#include "simd.h"
#include "types.h"

namespace headrace::VARIANT {

using Block = float[kGroup][kPanel];  // one group of one panel: [column][row]

constexpr float kSmallestNormalHalf = 6.103515625e-05f;
constexpr float kHalfStep = 2.98e-8f;  // half of what lies between two half-precision numbers below that

// The half-precision numbers nearest to `x`, written to `out`.
inline F8 as_half(F8 x, uint16_t* out) {
  store(out, x);
  return load(out);
}

// 1 / scale, and 0 for a scale of 0.
inline F8 reciprocal(F8 scale) { return zero_unless_above(div(all(1.0f), scale), scale, zero()); }

inline F8 clamp(F8 x, float low, float high) { return min(max(x, all(low)), all(high)); }  // a NaN becomes `low`

// NaN for a row that has a value which is not finite, else 0: such weights are noticed when the logits are.
inline F8 finite(const Block& block, int row) {
  F8 sum = zero();
  for (const auto& column : block) sum = add(sum, mul(load(column + row), zero()));
  return sum;
}

// Scale = largest / 127.
inline void round_to_8_bits(const Block& block, uint8_t* out) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(out + kPanel * kGroup);
  for (int row = 0; row < kPanel; row += 8) {
    F8 most = zero();
    for (const auto& column : block) most = max(abs(load(column + row)), most);
    F8 scale = add(mul(most, all(1.0f / 127.0f)), finite(block, row));
    // Where half precision runs out of bits the scale is rounded up, so that the largest value keeps its place.
    scale = add(scale, zero_unless_above(all(kHalfStep), all(kSmallestNormalHalf), scale));
    const F8 inverse = reciprocal(as_half(scale, scales + row));
    for (int k = 0; k < kGroup; ++k) {
      float whole[8];
      store(whole, clamp(nearest(mul(load(block[k] + row), inverse)), -127.0f, 127.0f));
      for (int i = 0; i < 8; ++i) out[k / 2 * 32 + (row + i) * 2 + k % 2] = static_cast<uint8_t>(static_cast<int8_t>(whole[i]));
    }
  }
}

// Eight rows' best scale and minimum for 4 bits, by squared error: that of the range from the smallest to the largest
// value, or narrower ranges, each followed by the least-squares line through the values and the integers they round to.
struct Grid {
  uint16_t scales[8], minima[8];
  float errors[8];
};

inline F8 level(F8 x, F8 minimum, F8 inverse) { return clamp(nearest(mul(sub(x, minimum), inverse)), 0.0f, 15.0f); }

inline void consider(const Block& block, int row, F8 scale, F8 minimum, Grid& best) {
  uint16_t scales[8], minima[8];
  scale = as_half(scale, scales);
  minimum = as_half(minimum, minima);
  const F8 inverse = reciprocal(scale);
  F8 error = zero();
  for (const auto& column : block) {
    const F8 x = load(column + row), away = sub(sub(x, minimum), mul(scale, level(x, minimum, inverse)));
    error = add(error, mul(away, away));
  }
  float errors[8];
  store(errors, error);
  for (int i = 0; i < 8; ++i) {
    if (!(errors[i] < best.errors[i])) continue;
    best.errors[i] = errors[i];
    best.scales[i] = scales[i];
    best.minima[i] = minima[i];
  }
}

inline Grid best_grid(const Block& block, int row) {
  F8 low = load(block[0] + row), high = low, total = zero();
  for (const auto& column : block) {
    low = min(load(column + row), low);
    high = max(load(column + row), high);
  }
  for (const auto& column : block) total = add(total, sub(load(column + row), low));
  const F8 range = sub(high, low), bad = finite(block, row), count = all(kGroup);
  Grid best;
  std::fill_n(best.errors, 8, INFINITY);
  // A row that is not finite has no error that is less: it keeps this.
  store(best.scales, add(mul(range, all(1.0f / 15.0f)), bad));
  store(best.minima, add(low, bad));
  consider(block, row, mul(range, all(1.0f / 15.0f)), low, best);
  for (const float share : {1.0f, 0.92f, 0.84f, 0.76f}) {
    if (std::all_of(best.errors, best.errors + 8, [](float e) { return e == 0.0f; })) break;
    const F8 start = add(low, mul(range, all((1.0f - share) / 2))), inverse = reciprocal(mul(range, all(share / 15.0f)));
    F8 q1 = zero(), q2 = zero(), qx = zero();
    for (const auto& column : block) {
      const F8 x = load(column + row), q = level(x, start, inverse);
      q1 = add(q1, q);
      q2 = add(q2, mul(q, q));
      qx = add(qx, mul(q, sub(x, low)));
    }
    const F8 spread = sub(mul(count, q2), mul(q1, q1));
    const F8 scale = mul(sub(mul(count, qx), mul(total, q1)), reciprocal(spread));
    consider(block, row, scale, add(low, div(sub(total, mul(scale, q1)), count)), best);
  }
  return best;
}

inline void round_to_4_bits(const Block& block, uint8_t* out) {
  uint16_t* scales = reinterpret_cast<uint16_t*>(out + kPanel * kGroup / 2);
  for (int row = 0; row < kPanel; row += 8) {
    const Grid grid = best_grid(block, row);
    std::copy_n(grid.scales, 8, scales + row);
    std::copy_n(grid.minima, 8, scales + kPanel + row);
    const F8 minimum = load(grid.minima), inverse = reciprocal(load(grid.scales));
    for (int k = 0; k < kGroup; ++k) {
      float whole[8];
      store(whole, level(load(block[k] + row), minimum, inverse));
      for (int i = 0; i < 8; ++i) {
        const int value = static_cast<int>(whole[i]);
        out[k / 8 * 64 + (row + i) * 4 + k % 4] |= k % 8 < 4 ? value : value << 4;
      }
    }
  }
}

// To the nearest, ties to even.
inline uint16_t to_brain(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return bits >> 16 | 0x40;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A group of at most 32 columns of a panel; returns the bytes that it takes.
inline int64_t write_group(const Block& block, int64_t columns, int32_t format, uint8_t* out) {
  uint16_t* halves = reinterpret_cast<uint16_t*>(out);
  switch (format) {
    case kInt8: round_to_8_bits(block, out); break;
    case kInt4: round_to_4_bits(block, out); break;
    case kFloat32: std::memcpy(out, block, columns * kPanel * 4); break;
    case kBFloat16:
      for (int64_t i = 0; i < columns * kPanel; ++i) halves[i] = to_brain(block[i / kPanel][i % kPanel]);
      break;
    case kFloat16:
      for (int64_t i = 0; i < columns * kPanel; i += 8) store(halves + i, load(block[i / kPanel] + i % kPanel));
      break;
  }
  return panel_bytes_of(format, columns);
}

template <class W>
inline void widen(const W* from, int64_t count, float* to) {
  for (; count >= 8; count -= 8, from += 8, to += 8) store(to, load(from));
  if (count == 0) return;
  W rest[8] = {};
  float wide[8];
  std::copy_n(from, count, rest);
  store(wide, load(rest));
  std::copy_n(wide, count, to);
}

template <class W>
void pack_panel(const Values& values, int64_t panel, int32_t format, uint8_t* out) {
  const int64_t first = panel * kPanel, rows = std::min<int64_t>(kPanel, values.rows - first);
  float wide[kPanel][kGroup] = {};
  Block block = {};
  for (int64_t begin = 0; begin < values.columns; begin += kGroup) {
    const int64_t columns = std::min<int64_t>(kGroup, values.columns - begin);
    for (int64_t i = 0; i < rows; ++i) {
      widen(reinterpret_cast<const W*>(values.data + (first + i) * values.row_bytes) + begin, columns, wide[i]);
    }
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t k = 0; k < columns; ++k) block[k][i] = wide[i][k];
    }
    out += write_group(block, columns, format, out);
  }
}

// `out` is zero, and has room for whole panels. The integer formats need whole groups.
inline void pack(const Values* values, int32_t format, uint8_t* out) {
  const int64_t panels = (values->rows + kPanel - 1) / kPanel, bytes = panel_bytes_of(format, values->columns);
  auto* one = values->format == kFloat32    ? pack_panel<float>
              : values->format == kBFloat16 ? pack_panel<Brain>
                                            : pack_panel<uint16_t>;
  const int64_t a_chunk = (panels + kMaxChunks - 1) / kMaxChunks;
  parallel(static_cast<int>((panels + a_chunk - 1) / a_chunk), [&](int chunk) {
    const int64_t end = std::min(panels, (chunk + 1) * a_chunk);
    for (int64_t panel = chunk * a_chunk; panel < end; ++panel) one(*values, panel, format, out + panel * bytes);
  });
}

}  // namespace headrace::VARIANT
