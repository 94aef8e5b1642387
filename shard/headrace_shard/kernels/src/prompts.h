// Products of a prompt's rows for AMX. The weights of a panel become bfloat16 on their way into the tiles, once for many
// rows, and a tile sums all columns of a run without a stop for the scales: many rows take a third of the time that
// integers take, one row takes several times as long. So all rows of prompts come here, however few, and no others do.
//
// A weight times an activation, both rounded to eight bits of mantissa, is exact in float32; sums are those of the tiles.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "gemm.h"

namespace headrace::VARIANT {

constexpr int kPromptRows = 256;   // of a panel's products at a time: what its weights cost is shared by so many
constexpr int kPromptGroups = 12;  // of two panels' weights in the nearest cache
constexpr int kPair = 2;           // panels that read the same activations

// A group of sixteen rows of activations, or of sixteen pairs of columns of a panel: what one tile holds.
struct alignas(64) BrainTile {
  uint16_t values[16][kGroup];
};

// Activations of a prompt [rows / 16, groups] in tiles.
struct Brains {
  int64_t groups;
  std::vector<BrainTile> tiles;

  BrainTile* at(int64_t row) { return tiles.data() + row / kAmxRows * groups; }
  const BrainTile* at(int64_t row) const { return tiles.data() + row / kAmxRows * groups; }
};

// Which column stands where among eight: int4 weights are widened two halves of a byte at a time, from bits 12 and 16 of
// their word turned by 0, 8, 16 and 24 bits.
constexpr int kTurned[8] = {5, 2, 4, 1, 7, 0, 6, 3};

inline __m512i turned_order() {
  alignas(64) static const std::array<uint16_t, kGroup> order = [] {
    std::array<uint16_t, kGroup> made{};
    for (int i = 0; i < kGroup; ++i) made[i] = static_cast<uint16_t>(i / 8 * 8 + kTurned[i % 8]);
    return made;
  }();
  return _mm512_load_si512(order.data());
}

// 32 columns of a row, to the nearest.
inline void put_brains(const float* x, uint16_t* out) {
  const __m512i plain = (__m512i)_mm512_cvtne2ps_pbh(load16(x + 16), load16(x));
  _mm512_store_si512(out, _mm512_permutexvar_epi16(turned_order(), plain));
}

// A cut at 16 bits rounds to the nearest, but for a seventh of the last place at most, if this has been added before.
constexpr float kHalfUp = 1.0028f;

// The upper halves of two columns' weights [16 rows], side by side.
inline __m512i side_by_side(F16 first, F16 second) {
  const __m512i upper = _mm512_set4_epi32(0x0f0e, 0x0b0a, 0x0706, 0x0302);
  return _mm512_mask_shuffle_epi8(_mm512_castps_si512(second), 0x3333333333333333, _mm512_castps_si512(first), upper);
}

// 1 + q 2^(at - 23), q being the four bits from `at` on.
template <int at>
inline F16 above_one(__m512i bits) {
  constexpr int kBoth = 0xea;  // (bits & mask) | one
  const __m512i mask = _mm512_set1_epi32(15 << at), one = _mm512_set1_epi32(0x3f800000);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(bits, mask, one, kBoth));
}

inline void widen_int4(const uint8_t* w, BrainTile& out) {
  constexpr float k12 = 2048, k16 = 128;  // 2^(23 - 12), 2^(23 - 16)
  const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup / 2);
  const F16 scale = mul(load16(half), all16(kHalfUp)), minimum = mul(load16(half + kPanel), all16(kHalfUp));
  const F16 scale12 = mul(scale, all16(k12)), scale16 = mul(scale, all16(k16));
  const F16 least12 = sub(minimum, scale12), least16 = sub(minimum, scale16);
  UNROLL for (int p = 0; p < 4; ++p) {
    const __m512i word = _mm512_loadu_si512(w + p * 64);
    UNROLL for (int turn = 0; turn < 4; ++turn) {
      const __m512i bits = turn == 0 ? word : _mm512_rolv_epi32(word, _mm512_set1_epi32(8 * turn));
      const F16 first = fma(scale12, above_one<12>(bits), least12), second = fma(scale16, above_one<16>(bits), least16);
      _mm512_store_si512(out.values[4 * p + turn], side_by_side(first, second));
    }
  }
}

inline void widen_int8(const uint8_t* w, BrainTile& out) {
  const F16 scale = mul(load16(reinterpret_cast<const uint16_t*>(w + kPanel * kGroup)), all16(kHalfUp));
  UNROLL for (int p = 0; p < 4; ++p) {
    F16 columns[8];
    UNROLL for (int pair = 0; pair < 4; ++pair) {
      const __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + (4 * p + pair) * 32)));
      columns[2 * pair] = mul(scale, _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(words, 16), 16)));
      columns[2 * pair + 1] = mul(scale, _mm512_cvtepi32_ps(_mm512_srai_epi32(words, 16)));
    }
    UNROLL for (int turn = 0; turn < 4; ++turn) {
      _mm512_store_si512(out.values[4 * p + turn], side_by_side(columns[kTurned[2 * turn]], columns[kTurned[2 * turn + 1]]));
    }
  }
}

// Adds the products of some groups of columns to `out`, or sets it; N is 1 or 2 tiles of rows.
template <int N>
inline void brain_tiles(
    const BrainTile* a, int64_t stride, const BrainTile (*w)[kPromptGroups], int groups, bool set, float* const* out) {
  // Tiles 0 to 3: sums; 4 and 5: activations; 6 and 7: weights.
  if (set) {
    _tile_zero(0);
    _tile_zero(1);
    if (N > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, out[0], 64);
    _tile_loadd(1, out[1], 64);
    if (N > 1) {
      _tile_loadd(2, out[0] + kAmxRows * kPanel, 64);
      _tile_loadd(3, out[1] + kAmxRows * kPanel, 64);
    }
  }
  for (int g = 0; g < groups; ++g) {
    _tile_loadd(4, a + g, 64);
    _tile_loadd(6, w[0] + g, 64);
    _tile_loadd(7, w[1] + g, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (N > 1) {
      _tile_loadd(5, a + stride + g, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out[0], 64);
  _tile_stored(1, out[1], 64);
  if (N > 1) {
    _tile_stored(2, out[0] + kAmxRows * kPanel, 64);
    _tile_stored(3, out[1] + kAmxRows * kPanel, 64);
  }
}

// out [2, tall, 16] of a pair of panels and a run of their columns; the last panel is its own partner. `tall` is a multiple
// of 16.
inline void pair_run(
    const Matrix& matrix, int panel, const Brains& a, int64_t row, int tall, int64_t begin, int64_t count, float* out) {
  alignas(64) BrainTile wide[kPair][kPromptGroups];
  const int64_t first = begin / kGroup, last = first + count / kGroup;
  const int64_t size = matrix.format == kInt4 ? kInt4Bytes : kInt8Bytes;
  for (int64_t group = first; group < last; group += kPromptGroups) {
    const int groups = static_cast<int>(std::min<int64_t>(kPromptGroups, last - group));
    for (int i = 0; i < kPair; ++i) {
      const int own = std::min(panel + i, matrix.panel_count() - 1);
      const uint8_t* w = matrix.panels + own * matrix.panel_bytes() + group * size;
      // What comes next: more columns, or the next pair's first ones.
      const uint8_t* ahead = group + groups < last ? w + groups * size : w - group * size + kPair * matrix.panel_bytes();
      for (int g = 0; g < groups; ++g) {
        for (int64_t line = 0; line < size; line += 64) prefetch(ahead + g * size + line);
        matrix.format == kInt4 ? widen_int4(w + g * size, wide[i][g]) : widen_int8(w + g * size, wide[i][g]);
      }
    }
    asm volatile("" ::: "memory");  // gcc's intrinsics do not say that a tile is loaded from memory
    for (int i = 0; i < tall; i += 2 * kAmxRows) {
      const BrainTile* at = a.at(row + i) + group;
      float* const to[] = {out + i * kPanel, out + (tall + i) * kPanel};
      if (i + kAmxRows < tall) {
        brain_tiles<2>(at, a.groups, wide, groups, group == first, to);
      } else {
        brain_tiles<1>(at, a.groups, wide, groups, group == first, to);
      }
    }
    asm volatile("" ::: "memory");  // nor that one is stored
  }
}

// out [2, tall, 16] of a pair of panels, their bias added; the second half goes to `other` if it is wanted apart.
inline void pair_tile(
    const Matrix& matrix, int panel, const Brains& a, int64_t row, int tall, float* out, float* other = nullptr) {
  in_runs<kPair * kPromptRows * kPanel>(
      matrix, out, other,
      [&](int64_t begin, int64_t count, float* to) { pair_run(matrix, panel, a, row, tall, begin, count, to); },
      [&](float* to) {
        for (int i = 0; i < std::min(kPair, matrix.panel_count() - panel); ++i) {
          add_bias(matrix, panel + i, tall, to + i * tall * kPanel);
        }
      },
      [&](const float* from, float* to) { add_to(kPair * tall * kPanel, from, to); });
}

struct PromptTiles {
  static constexpr int kBlockRows = kPromptRows, kTileRows = kPromptRows, kTileStep = kAmxRows;
  const AmxTiles tiles{{64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
};

inline int whole_tiles(int rows) { return (rows + kAmxRows - 1) / kAmxRows * kAmxRows; }

inline void make_room(int64_t rows, int64_t columns, Brains& made) {
  made.groups = columns / kGroup;
  const size_t wanted = (rows + kAmxRows - 1) / kAmxRows * made.groups;
  if (made.tiles.size() < wanted) made.tiles.resize(wanted);
}

// Fills `made` for x [rows, columns].
inline void prepare(const float* x, int64_t rows, const Norm* norm, int64_t columns, Brains& made) {
  make_room(rows, columns, made);
  parallel(static_cast<int>((rows + kAmxRows - 1) / kAmxRows), [&](int tile) {
    std::vector<float> normed(norm ? columns : 0);
    for (int64_t i = tile * int64_t{kAmxRows}; i < std::min(rows, (tile + int64_t{1}) * kAmxRows); ++i) {
      const float* row = x + i * columns;
      if (norm) norm_row(row, *norm, columns, normed.data());
      for (int64_t g = 0; g < made.groups; ++g) {
        put_brains((norm ? normed.data() : row) + g * kGroup, made.at(i)[g].values[i % kAmxRows]);
      }
    }
  });
}

// As `multiply` of gemm.h.
inline void multiply(
    const Brains& a, int64_t rows, const Matrix* parts, int count, const float* residual, float* out, int64_t plane) {
  int units = 0;
  int64_t stride = 0;
  for (int i = 0; i < count; ++i) {
    units += (parts[i].panel_count() + 1) / kPair;
    stride += parts[i].rows;
  }
  each_tile<PromptTiles>(rows, units, 1, [&](Units found, int64_t row, int tall) {
    int unit = found.first;
    const Matrix* matrix = parts;
    int64_t column = 0;
    for (; unit >= (matrix->panel_count() + 1) / kPair; ++matrix) {
      unit -= (matrix->panel_count() + 1) / kPair;
      column += matrix->rows;
    }
    alignas(64) float y[kPair * kPromptRows * kPanel], other[kPair * kPromptRows * kPanel];
    const int whole = whole_tiles(tall);
    pair_tile(*matrix, kPair * unit, a, row, whole, y, matrix->apart ? other : nullptr);
    for (int i = 0; i < std::min(kPair, matrix->panel_count() - kPair * unit); ++i) {
      const int panel = kPair * unit + i, at = i * whole * kPanel;
      const Target to{residual, out, plane, stride, row * stride + column + panel * kPanel};
      put_tile(*matrix, panel, tall, y + at, other + at, to);
    }
  });
}

inline bool takes_prompts(const Matrix* parts, int count) {
  return std::all_of(parts, parts + count, [](const Matrix& part) { return part.format == kInt4 || part.format == kInt8; });
}

inline void linear_of_prompts(
    const float* x, int64_t rows, const Norm* norm, const Matrix* parts, int count, const float* residual, float* out,
    int64_t plane) {
  static thread_local Brains made;
  Brains& a = made;  // a thread_local of the caller, which other threads read
  prepare(x, rows, norm, parts[0].columns, a);
  multiply(a, rows, parts, count, residual, out, plane);
}

inline void mlp_of_prompts(
    const float* x, int64_t rows, const Norm* norm, const Matrix* gate_up, const Matrix* down, const float* residual,
    float* out, int64_t plane) {
  static thread_local Brains made, between;
  Brains &a = made, &b = between;
  prepare(x, rows, norm, gate_up[0].columns, a);
  make_room(rows, down->columns, b);
  each_tile<PromptTiles>(rows, static_cast<int>(b.groups), 1, [&](Units found, int64_t row, int tall) {
    const int unit = found.first;
    alignas(64) float gate[kPair * kPromptRows * kPanel], up[kPair * kPromptRows * kPanel], inner[kGroup];
    const int whole = whole_tiles(tall);
    pair_tile(gate_up[0], kPair * unit, a, row, whole, gate);
    pair_tile(gate_up[1], kPair * unit, a, row, whole, up);
    for (int i = 0; i < tall; ++i) {
      UNROLL for (int half = 0; half < kPair; ++half) {
        const int at = (half * whole + i) * kPanel;
        store(inner + half * kPanel, mul(silu(load16(gate + at)), load16(up + at)));
      }
      put_brains(inner, b.at(row + i)[unit].values[(row + i) % kAmxRows]);
    }
  });
  multiply(b, rows, down, 1, residual, out, plane);
}

}  // namespace headrace::VARIANT
