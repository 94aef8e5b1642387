// Products of a prompt's rows for AMX. The weights of a panel become bfloat16 on their way into the tiles, once for many
// rows, and a tile sums all columns of a run without a stop for the scales: many rows take less than half the time that
// integers take, one row takes two to three times as long. So all rows of prompts come here, however few, and no others do.
//
// A weight times an activation, both rounded to eight bits of mantissa, is exact in float32; sums are those of the tiles.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "gemm.h"

namespace headrace::VARIANT {

constexpr int kPromptRows = 256;   // of a panel's products at a time: what its weights cost is shared by so many
constexpr int kPromptGroups = 9;   // of two panels' weights, twice, in the nearest cache
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

// Two panels of a matrix, one below the other; the last panel of an odd number is its own partner.
struct Pair {
  const Matrix* matrix;
  int panel;

  int64_t group_bytes() const { return matrix->format == kInt4 ? kInt4Bytes : kInt8Bytes; }
  const uint8_t* group(int i, int64_t number) const {
    const int own = std::min(panel + i, matrix->panel_count() - 1);
    return matrix->panels + own * matrix->panel_bytes() + number * group_bytes();
  }
};

// Some groups of a pair's columns, all of one run.
struct Slab {
  Pair pair;
  int64_t group;
  int groups;  // 0: there is no such slab

  // Brings a group of one of the panels into the cache.
  void ask(int panel, int number) const {
    const uint8_t* at = pair.group(panel, group + number);
    asm volatile("" : "+r"(at));  // gcc drops calls of a function that does nothing but prefetch
    for (int64_t line = 0; line < pair.group_bytes(); line += 64) prefetch(at + line);
  }
};

// The slabs of some pairs, in the order in which they are multiplied.
template <class PairOf>
class Slabs {
 public:
  Slabs(const PairOf& pair_of, int first, int last) : pair_of_(pair_of), pair_(first), last_(last) {}

  Slab next() {
    for (; pair_ < last_; ++pair_, run_ = 0) {
      const Pair pair = pair_of_(pair_);
      const Matrix& matrix = *pair.matrix;
      const int64_t ends[] = {matrix.breaks[0], matrix.breaks[1], matrix.breaks[2], matrix.columns};
      for (; run_ < 4; ++run_) {
        const int64_t end = ends[run_] / kGroup;
        if (group_ >= end) continue;
        const Slab slab{pair, group_, even_part(end - group_, kPromptGroups)};
        group_ += slab.groups;
        return slab;
      }
      group_ = 0;
    }
    return {{nullptr, 0}, 0, 0};
  }

 private:
  const PairOf& pair_of_;
  int pair_, last_, run_ = 0;
  int64_t group_ = 0;
};

// Where two panels' products will be written: two lines in each of some rows, which another core may have.
struct Landing {
  const float* at;
  int64_t stride;
  int64_t rows;

  void ask() {
    if (rows == 0) return;
    prefetch_to_write(at);
    prefetch_to_write(at + kPanel);
    at += stride;
    --rows;
  }
};

// Widens one slab, a group at a time, while another is multiplied: vectors and tiles work side by side. Asks for the
// memory of the one behind it, and of some rows of the result.
class Widening {
 public:
  // In how many steps it should be done.
  Widening(const Slab& slab, const Slab& behind, int steps, BrainTile (*out)[kPromptGroups], Landing& landing)
      : slab_(slab), behind_(behind), out_(out), landing_(landing), left_(kPair * slab.groups), share_(left_), steps_(steps) {}

  void step() {
    landing_.ask();
    landing_.ask();
    for (due_ += share_; due_ >= steps_ && left_; due_ -= steps_) one();
  }
  void rest() {
    while (left_) one();
  }

 private:
  void one() {
    const int i = --left_ % kPair, g = left_ / kPair;
    const uint8_t* w = slab_.pair.group(i, slab_.group + g);
    if (g < behind_.groups) behind_.ask(i, g);
    slab_.pair.matrix->format == kInt4 ? widen_int4(w, out_[i][g]) : widen_int8(w, out_[i][g]);
  }

  Slab slab_, behind_;
  BrainTile (*out_)[kPromptGroups];
  Landing& landing_;
  int left_, share_, steps_, due_ = 0;
};

// Adds the products of some groups of columns to `out`, or sets it, and widens some of the next weights at each step; N is
// 1 or 2 tiles of rows.
template <int N>
inline void brain_tiles(
    const BrainTile* a, int64_t stride, const BrainTile (*w)[kPromptGroups], int groups, bool set, float* const* out,
    Widening& next) {
  // Tiles 0 to 3: sums; 4 and 5: activations; 6 and 7: weights.
  if (set) {
    _tile_zero(0);
    _tile_zero(1);
    if (N > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_stream_loadd(0, out[0], 64);
    _tile_stream_loadd(1, out[1], 64);
    if (N > 1) {
      _tile_stream_loadd(2, out[0] + kAmxRows * kPanel, 64);
      _tile_stream_loadd(3, out[1] + kAmxRows * kPanel, 64);
    }
  }
  for (int g = 0; g < groups; ++g) {
    _tile_stream_loadd(4, a + g, 64);
    _tile_loadd(6, w[0] + g, 64);
    _tile_loadd(7, w[1] + g, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (N > 1) {
      _tile_stream_loadd(5, a + stride + g, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    next.step();
  }
  _tile_stored(0, out[0], 64);
  _tile_stored(1, out[1], 64);
  if (N > 1) {
    _tile_stored(2, out[0] + kAmxRows * kPanel, 64);
    _tile_stored(3, out[1] + kAmxRows * kPanel, 64);
  }
}

// Multiplies the slabs of some pairs of panels, one after the other.
template <class PairOf>
class Multiplier {
 public:
  // The pairs first .. last - 1 will be asked for in their order.
  Multiplier(const PairOf& pair_of, int first, int last) : slabs_(pair_of, first, last), next_(slabs_.next()) {
    for (int g = 0; g < next_.groups; ++g) {
      for (int i = 0; i < kPair; ++i) next_.ask(i, g);
    }
    widening(1).rest();
  }

  Landing landing{nullptr, 0, 0};  // of what is multiplied next

  // out [2, tall, 16] of a run of the pair's columns. `tall` is a multiple of 16.
  void run(const Brains& a, int64_t row, int tall, int64_t begin, int64_t count, float* out) {
    const int64_t first = begin / kGroup, last = first + count / kGroup;
    for (int64_t group = first; group < last;) {
      const int groups = even_part(last - group, kPromptGroups);
      const BrainTile (*wide)[kPromptGroups] = wide_[turn_];
      turn_ = 1 - turn_;
      Widening next = widening((tall + 2 * kAmxRows - 1) / (2 * kAmxRows) * groups);
      asm volatile("" ::: "memory");  // gcc's intrinsics do not say that a tile is loaded from memory
      for (int i = 0; i < tall; i += 2 * kAmxRows) {
        const BrainTile* at = a.at(row + i) + group;
        float* const to[] = {out + i * kPanel, out + (tall + i) * kPanel};
        if (i + kAmxRows < tall) {
          brain_tiles<2>(at, a.groups, wide, groups, group == first, to, next);
        } else {
          brain_tiles<1>(at, a.groups, wide, groups, group == first, to, next);
        }
      }
      next.rest();
      asm volatile("" ::: "memory");  // nor that one is stored
      group += groups;
    }
  }

 private:
  Widening widening(int steps) {
    const Slab slab = next_;
    next_ = slabs_.next();
    return Widening(slab, next_, steps, wide_[turn_], landing);
  }

  Slabs<PairOf> slabs_;
  Slab next_;
  int turn_ = 0;
  alignas(64) BrainTile wide_[2][kPair][kPromptGroups];
};

// out [2, tall, 16] of the next pair of panels, their bias added; the second half goes to `other` if it is wanted apart.
template <class PairOf>
void pair_tile(
    Multiplier<PairOf>& multiplier, const Pair& pair, const Brains& a, int64_t row, int tall, float* out,
    float* other = nullptr) {
  const Matrix& matrix = *pair.matrix;
  in_runs<kPair * kPromptRows * kPanel>(
      matrix, out, other,
      [&](int64_t begin, int64_t count, float* to) { multiplier.run(a, row, tall, begin, count, to); },
      [&](float* to) {
        for (int i = 0; i < std::min(kPair, matrix.panel_count() - pair.panel); ++i) {
          add_bias(matrix, pair.panel + i, tall, to + i * tall * kPanel);
        }
      },
      [&](const float* from, float* to) { add_to(kPair * tall * kPanel, from, to); });
}

struct PromptTiles {
  static constexpr int kBlockRows = kPromptRows, kChunks = 4, kTileRows = kPromptRows, kTileStep = kAmxRows;
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
    const int64_t first = tile * int64_t{kAmxRows}, count = std::min<int64_t>(kAmxRows, rows - first);
    const float* from = x + first * columns;
    std::vector<float> normed(norm ? count * columns : 0);
    for (int64_t i = 0; norm && i < count; ++i) norm_row(from + i * columns, *norm, columns, normed.data() + i * columns);
    if (norm) from = normed.data();
    for (int64_t g = 0; g < made.groups; ++g) {  // a tile after the other: memory is written from end to end
      for (int64_t i = 0; i < count; ++i) put_brains(from + i * columns + g * kGroup, made.at(first)[g].values[i]);
    }
  });
}

constexpr float kLog2e = 1.44269504088896341f;

// 2^x for x in [-126, 126], relative error below 3e-6; a polynomial of degree 4 around the nearest whole number.
inline F16 two_to_any(F16 x) {
  const F16 whole = nearest(x), f = sub(x, whole);
  F16 y = fma(all16(0.00957009f), f, all16(0.05591786f));
  y = fma(y, f, all16(0.24024745f));
  y = fma(y, f, all16(0.69312181f));
  y = fma(y, f, all16(0.99999926f));
  return _mm512_scalef_ps(y, whole);
}

// x / (1 + 2^(-x log2 e)) with a relative error of some 2^-13: it is rounded to bfloat16 soon.
inline F16 nearly_silu(F16 x) {
  const F16 exponent = min(all16(126), max(all16(-126), mul(x, all16(-kLog2e))));  // the constant first: a NaN goes through
  return mul(x, _mm512_rcp14_ps(add(all16(1), two_to_any(exponent))));
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
  const auto pair_of = [&](int unit) {
    const Matrix* matrix = parts;
    for (; unit >= (matrix->panel_count() + 1) / kPair; ++matrix) unit -= (matrix->panel_count() + 1) / kPair;
    return Pair{matrix, kPair * unit};
  };
  each_tile<PromptTiles>(rows, units, units, [&](Units found, int64_t row, int tall) {
    Multiplier multiplier(pair_of, found.first, found.first + found.count);
    alignas(64) float y[kPair * kPromptRows * kPanel], other[kPair * kPromptRows * kPanel];
    const int whole = whole_tiles(tall);
    for (int unit = found.first; unit < found.first + found.count; ++unit) {
      const Pair pair = pair_of(unit);
      int64_t column = 0;
      for (const Matrix* part = parts; part < pair.matrix; ++part) column += part->rows;
      multiplier.landing = {out + row * stride + column + pair.panel * kPanel, stride, tall};
      pair_tile(multiplier, pair, a, row, whole, y, pair.matrix->apart ? other : nullptr);
      const int panels = std::min(kPair, pair.matrix->panel_count() - pair.panel);
      for (int begin = 0; begin < tall; begin += kAmxRows) {  // the panels' columns are neighbours in a row
        for (int i = 0; i < panels; ++i) {
          const int panel = pair.panel + i, at = (i * whole + begin) * kPanel;
          const Target to{residual, out, plane, stride, (row + begin) * stride + column + panel * kPanel};
          put_tile(*pair.matrix, panel, std::min(kAmxRows, tall - begin), y + at, other + at, to);
        }
      }
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
  const int units = static_cast<int>(b.groups);
  const auto pair_of = [&](int i) { return Pair{gate_up + i % 2, kPair * (i / 2)}; };
  each_tile<PromptTiles>(rows, units, units, [&](Units found, int64_t row, int tall) {
    Multiplier multiplier(pair_of, 2 * found.first, 2 * (found.first + found.count));
    alignas(64) float gate[kPair * kPromptRows * kPanel], up[kPair * kPromptRows * kPanel], inner[kGroup];
    const int whole = whole_tiles(tall);
    for (int unit = found.first; unit < found.first + found.count; ++unit) {
      pair_tile(multiplier, pair_of(2 * unit), a, row, whole, gate);
      pair_tile(multiplier, pair_of(2 * unit + 1), a, row, whole, up);
      for (int i = 0; i < tall; ++i) {
        UNROLL for (int half = 0; half < kPair; ++half) {
          const int at = (half * whole + i) * kPanel;
          store(inner + half * kPanel, mul(nearly_silu(load16(gate + at)), load16(up + at)));
        }
        put_brains(inner, b.at(row + i)[unit].values[(row + i) % kAmxRows]);
      }
    }
  });
  multiply(b, rows, down, 1, residual, out, plane);
}

}  // namespace headrace::VARIANT
