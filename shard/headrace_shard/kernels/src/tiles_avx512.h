// The integer tiles of tiles.h for AVX-512 with VNNI.
#pragma once

#include "simd16.h"
#include "types.h"

namespace headrace::VARIANT {

// The same four bytes in all sixteen lanes.
inline __m512i four_bytes(const void* p) {
  int32_t bits;
  std::memcpy(&bits, p, 4);
  return _mm512_set1_epi32(bits);
}

// Per group: 16 pairs of columns, each as [16 rows][2] bytes; then 16 scales.
template <int MR>
inline void int8_tile(const uint8_t* w, const int16_t* a, const float* scales, int64_t rows, int64_t count, float* out) {
  const int64_t ahead = MR == 1 ? 8 * kInt8Bytes : count / kGroup * kInt8Bytes;
  F16 f[MR];
  UNROLL for (int m = 0; m < MR; ++m) f[m] = zero16();
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt8Bytes) {
    __m512i c[MR];
    UNROLL for (int m = 0; m < MR; ++m) c[m] = _mm512_setzero_si512();
    UNROLL for (int p = 0; p < kInt8Bytes; p += 64) prefetch(w + ahead + p);
    const int16_t* at = a + g * rows * kGroup;
    UNROLL for (int p = 0; p < 16; ++p) {
      const __m512i pair = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + p * 32)));
      UNROLL for (int m = 0; m < MR; ++m) c[m] = _mm512_dpwssd_epi32(c[m], pair, four_bytes(at + m * kGroup + p * 2));
    }
    const F16 scale = load16(reinterpret_cast<const uint16_t*>(w + kPanel * kGroup));
    UNROLL for (int m = 0; m < MR; ++m) {
      f[m] = fma(_mm512_cvtepi32_ps(c[m]), mul(scale, all16(scales[g * rows + m])), f[m]);
    }
  }
  UNROLL for (int m = 0; m < MR; ++m) store(out + m * kPanel, f[m]);
}

// Per group: 4 runs of 8 columns, each as [16 rows][4] bytes whose low halves are the first four columns and whose high
// halves the last four; then 16 scales and 16 minima.
template <int MR>
inline void int4_tile(
    const uint8_t* w, const int8_t* a, const float* scales, const float* sums, int64_t rows, int64_t count, float* out) {
  const __m512i low = _mm512_set1_epi8(15);
  const int64_t ahead = MR == 1 ? 12 * kInt4Bytes : count / kGroup * kInt4Bytes;
  F16 f[MR];
  UNROLL for (int m = 0; m < MR; ++m) f[m] = zero16();
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt4Bytes) {
    __m512i c[MR];
    UNROLL for (int m = 0; m < MR; ++m) c[m] = _mm512_setzero_si512();
    UNROLL for (int p = 0; p < kInt4Bytes; p += 64) prefetch(w + ahead + p);
    const int8_t* at = a + g * rows * kGroup;
    UNROLL for (int p = 0; p < 4; ++p) {
      const __m512i both = _mm512_loadu_si512(w + p * 64);
      const __m512i first = _mm512_and_si512(both, low), last = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      UNROLL for (int m = 0; m < MR; ++m) c[m] = _mm512_dpbusd_epi32(c[m], first, four_bytes(at + m * kGroup + p * 8));
      UNROLL for (int m = 0; m < MR; ++m) c[m] = _mm512_dpbusd_epi32(c[m], last, four_bytes(at + m * kGroup + p * 8 + 4));
    }
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup / 2);
    const F16 scale = load16(half), minimum = load16(half + kPanel);
    UNROLL for (int m = 0; m < MR; ++m) {
      f[m] = fma(_mm512_cvtepi32_ps(c[m]), mul(scale, all16(scales[g * rows + m])), f[m]);
      f[m] = fma(minimum, all16(sums[g * rows + m]), f[m]);
    }
  }
  UNROLL for (int m = 0; m < MR; ++m) store(out + m * kPanel, f[m]);
}

}  // namespace headrace::VARIANT
