// Integer tiles of many rows for AMX: the sums of integers are its own, and exact; what is done to them is what
// tiles_avx512.h does, in the same order, so that the results are the same bits.
//
// AMX and vectors of 512 bits slow each other down, so they take turns: some groups of the panel are widened to what a tile
// reads, then all their products are made, then they are scaled and summed.
#pragma once

#include <algorithm>
#include <initializer_list>

#include "tiles_avx512.h"

namespace headrace::VARIANT {

constexpr int kAmxRows = 16;    // of activations in a tile
constexpr int kAmxTiles = 3;    // that a call takes at most
constexpr int kAmxGroups = 4;   // in a turn: their products stay in the nearest cache
using Products = int32_t[kAmxRows * kPanel];

// The shapes of this thread's tiles, and their state, for as long as it lives.
class AmxTiles {
 public:
  AmxTiles(std::initializer_list<uint16_t> row_bytes, std::initializer_list<uint8_t> rows) {
    alignas(64) Shapes shapes{1, {}, {}};
    std::copy(row_bytes.begin(), row_bytes.end(), shapes.row_bytes);
    std::copy(rows.begin(), rows.end(), shapes.rows);
    asm volatile("ldtilecfg %0" ::"m"(shapes));  // gcc 12 takes its own intrinsic to read the first bytes alone
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  struct Shapes {
    alignas(16) uint8_t palette;
    alignas(16) uint16_t row_bytes[16];
    uint8_t rows[16];
  };
};

// Bytes 0 to 15, four columns a row.
inline void widen(const uint8_t* w, const int8_t*, uint8_t* out) {
  const __m512i low = _mm512_set1_epi8(15);
  UNROLL for (int p = 0; p < 4; ++p) {
    const __m512i both = _mm512_loadu_si512(w + p * 64);
    _mm512_store_si512(out + p * 128, _mm512_and_si512(both, low));
    _mm512_store_si512(out + p * 128 + 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
  }
}

// Four columns a row, of two pairs of columns.
inline void widen(const uint8_t* w, const int16_t*, uint8_t* out) {
  const __m512i order = _mm512_set_epi16(
      31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  UNROLL for (int p = 0; p < 8; ++p) {
    _mm512_store_si512(out + p * 64, _mm512_permutexvar_epi16(order, _mm512_loadu_si512(w + p * 64)));
  }
}

// Tiles 0 and 1: products; 2 and 4: activations; 3: weights.
inline void make_products(const int8_t* a, const uint8_t* wide, Products* out) {
  _tile_zero(0);
  _tile_loadd(2, a, kGroup);
  _tile_loadd(3, wide, 64);
  _tile_dpbsud(0, 2, 3);
  _tile_stored(0, out[0], 64);
}

// A word is 256 times its upper byte, which has the sign, and its lower one: two products of bytes. In a group of a row the
// lower ones come first.
inline void make_products(const int16_t* a, const uint8_t* wide, Products* out) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(a);
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(3, wide, 64);
  _tile_loadd(2, bytes, 64);
  _tile_dpbusd(0, 2, 3);
  _tile_loadd(4, bytes + kGroup, 64);
  _tile_dpbssd(1, 4, 3);
  _tile_stored(0, out[0], 64);
  _tile_stored(1, out[1], 64);
}

// The sums of products of row m of a tile.
inline __m512i whole(const int8_t*, const Products* products, int m) {
  return _mm512_load_si512(products[0] + m * kPanel);
}

inline __m512i whole(const int16_t*, const Products* products, int m) {
  const __m512i upper = _mm512_slli_epi32(_mm512_load_si512(products[1] + m * kPanel), 8);
  return _mm512_add_epi32(upper, _mm512_load_si512(products[0] + m * kPanel));
}

// A: int8_t for int4 weights, int16_t for int8 ones. out [tall, 16], tall at most 48; `sums` are read for int4 alone.
template <class A>
inline void amx_tile(
    const uint8_t* w, const A* a, const float* scales, const float* sums, int64_t rows, int64_t count, int tall, float* out) {
  constexpr bool kHasMinima = sizeof(A) == 1;
  constexpr int64_t kBytes = kHasMinima ? kInt4Bytes : kInt8Bytes, kScales = kHasMinima ? kPanel * kGroup / 2 : kPanel * kGroup;
  constexpr int kParts = sizeof(A), kWide = kPanel * kGroup;
  const int64_t groups = count / kGroup;
  const int tiles = (tall + kAmxRows - 1) / kAmxRows;
  alignas(64) uint8_t wide[kAmxGroups * kWide];
  alignas(64) Products products[kAmxTiles * kAmxGroups * kParts];
  alignas(64) float total[kAmxTiles * kAmxRows * kPanel] = {};
  for (int64_t begin = 0; begin < groups; begin += kAmxGroups) {
    const int turn = static_cast<int>(std::min<int64_t>(kAmxGroups, groups - begin));
    for (int g = 0; g < turn; ++g) {
      const uint8_t* group = w + (begin + g) * kBytes;
      for (int64_t p = 0; p < kBytes; p += 64) prefetch(group + groups * kBytes + p);  // of the next panel
      widen(group, a, wide + g * kWide);
    }
    asm volatile("" ::: "memory");  // gcc's intrinsics do not say that a tile is loaded from memory
    for (int g = 0; g < turn; ++g) {
      for (int t = 0; t < tiles; ++t) {
        make_products(a + ((begin + g) * rows + t * kAmxRows) * kGroup, wide + g * kWide, products + (t * kAmxGroups + g) * kParts);
      }
    }
    for (int t = 0; t < tiles; ++t) {
      float* const to = total + t * kAmxRows * kPanel;
      F16 f[kAmxRows];
      UNROLL for (int m = 0; m < kAmxRows; ++m) f[m] = load16(to + m * kPanel);
      for (int g = 0; g < turn; ++g) {
        const uint16_t* half = reinterpret_cast<const uint16_t*>(w + (begin + g) * kBytes + kScales);
        const float *row_scales = scales + (begin + g) * rows + t * kAmxRows, *row_sums = sums + (begin + g) * rows + t * kAmxRows;
        const F16 scale = load16(half);
        [[maybe_unused]] const F16 minimum = kHasMinima ? load16(half + kPanel) : zero16();
        UNROLL for (int m = 0; m < kAmxRows; ++m) {
          const F16 product = _mm512_cvtepi32_ps(whole(a, products + (t * kAmxGroups + g) * kParts, m));
          f[m] = fma(product, mul(scale, all16(row_scales[m])), f[m]);
          if constexpr (kHasMinima) f[m] = fma(minimum, all16(row_sums[m]), f[m]);
        }
      }
      UNROLL for (int m = 0; m < kAmxRows; ++m) store(to + m * kPanel, f[m]);
    }
  }
  std::copy(total, total + tall * kPanel, out);
}

}  // namespace headrace::VARIANT
