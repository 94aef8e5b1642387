// The integer tiles of tiles.h for AVX2.
#pragma once

#include "simd.h"
#include "types.h"

namespace headrace::VARIANT {

// gcc re-associates integer sums, and then has more of them than registers; this keeps each where it is.
#define KEEP(a, b) asm("" : "+x"(a), "+x"(b))

inline __m256i wide(const void* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  return _mm256_set1_epi32(bits);
}

// Per group: 16 pairs of columns, each as [16 rows][2] bytes; then 16 scales.
template <int MR>
inline void int8_tile(const uint8_t* w, const int16_t* a, const float* scales, int64_t rows, int64_t count, float* out) {
  const int64_t ahead = MR == 1 ? 8 * kInt8Bytes : count / kGroup * kInt8Bytes;
  F8 f[MR][2];
  UNROLL for (int m = 0; m < MR; ++m) f[m][0] = f[m][1] = zero();
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt8Bytes) {
    __m256i c[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) c[m][0] = c[m][1] = _mm256_setzero_si256();
    UNROLL for (int p = 0; p < kInt8Bytes; p += 64) prefetch(w + ahead + p);
    const int16_t* at = a + g * rows * kGroup;
    UNROLL for (int p = 0; p < 16; ++p) {
      const __m128i* pair = reinterpret_cast<const __m128i*>(w + p * 32);
      __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair)), w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair + 1));
      UNROLL for (int m = 0; m < MR; ++m) {
        __m256i x = wide(at + m * kGroup + p * 2);
        c[m][0] = _mm256_add_epi32(c[m][0], _mm256_madd_epi16(w0, x));
        c[m][1] = _mm256_add_epi32(c[m][1], _mm256_madd_epi16(w1, x));
        KEEP(c[m][0], c[m][1]);
      }
    }
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup);
    F8 s0 = load(half), s1 = load(half + 8);
    UNROLL for (int m = 0; m < MR; ++m) {
      F8 s = all(scales[g * rows + m]);
      f[m][0] = fma(_mm256_cvtepi32_ps(c[m][0]), mul(s0, s), f[m][0]);
      f[m][1] = fma(_mm256_cvtepi32_ps(c[m][1]), mul(s1, s), f[m][1]);
    }
  }
  UNROLL for (int m = 0; m < MR; ++m) {
    store(out + m * kPanel, f[m][0]);
    store(out + m * kPanel + 8, f[m][1]);
  }
}

// Per group: 4 runs of 8 columns, each as [16 rows][4] bytes whose low halves are the first four columns and whose high
// halves the last four; then 16 scales and 16 minima. Sums of 16 products of 15 x 127 fit into 16 bits.
template <int MR>
inline void int4_tile(
    const uint8_t* w, const int8_t* a, const float* scales, const float* sums, int64_t rows, int64_t count, float* out) {
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  const int64_t ahead = MR == 1 ? 12 * kInt4Bytes : count / kGroup * kInt4Bytes;
  F8 f[MR][2];
  UNROLL for (int m = 0; m < MR; ++m) f[m][0] = f[m][1] = zero();
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt4Bytes) {
    __m256i c[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) c[m][0] = c[m][1] = _mm256_setzero_si256();
    UNROLL for (int p = 0; p < kInt4Bytes; p += 64) prefetch(w + ahead + p);
    const int8_t* at = a + g * rows * kGroup;
    UNROLL for (int p = 0; p < 4; ++p) {
      const __m256i* run = reinterpret_cast<const __m256i*>(w + p * 64);
      __m256i v0 = _mm256_loadu_si256(run), v1 = _mm256_loadu_si256(run + 1);
      __m256i w0 = _mm256_and_si256(v0, low), w1 = _mm256_and_si256(v1, low);
      UNROLL for (int m = 0; m < MR; ++m) {
        __m256i x = wide(at + m * kGroup + p * 8);
        c[m][0] = _mm256_add_epi16(c[m][0], _mm256_maddubs_epi16(w0, x));
        c[m][1] = _mm256_add_epi16(c[m][1], _mm256_maddubs_epi16(w1, x));
        KEEP(c[m][0], c[m][1]);
      }
      w0 = _mm256_and_si256(_mm256_srli_epi16(v0, 4), low);
      w1 = _mm256_and_si256(_mm256_srli_epi16(v1, 4), low);
      UNROLL for (int m = 0; m < MR; ++m) {
        __m256i x = wide(at + m * kGroup + p * 8 + 4);
        c[m][0] = _mm256_add_epi16(c[m][0], _mm256_maddubs_epi16(w0, x));
        c[m][1] = _mm256_add_epi16(c[m][1], _mm256_maddubs_epi16(w1, x));
        KEEP(c[m][0], c[m][1]);
      }
    }
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup / 2);
    F8 s0 = load(half), s1 = load(half + 8), m0 = load(half + 16), m1 = load(half + 24);
    UNROLL for (int m = 0; m < MR; ++m) {
      F8 s = all(scales[g * rows + m]), z = all(sums[g * rows + m]);
      f[m][0] = fma(_mm256_cvtepi32_ps(_mm256_madd_epi16(c[m][0], ones)), mul(s0, s), f[m][0]);
      f[m][0] = fma(m0, z, f[m][0]);
      f[m][1] = fma(_mm256_cvtepi32_ps(_mm256_madd_epi16(c[m][1], ones)), mul(s1, s), f[m][1]);
      f[m][1] = fma(m1, z, f[m][1]);
    }
  }
  UNROLL for (int m = 0; m < MR; ++m) {
    store(out + m * kPanel, f[m][0]);
    store(out + m * kPanel + 8, f[m][1]);
  }
}

#undef KEEP

}  // namespace headrace::VARIANT
