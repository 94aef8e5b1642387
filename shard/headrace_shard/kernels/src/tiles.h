// The innermost loops of the matrix products: MR rows of activations times one panel of 16 weight rows.
//
// `a` has `columns` columns, of which the first `count` are summed. However many rows share a call, each row's sums are taken in the same order: integers within a group, where order does
// not matter, then groups from first to last. So a row's result does not depend on its company.
#pragma once

#include "simd.h"
#include "types.h"

namespace headrace::VARIANT {

constexpr int64_t kFloatRun = 128;  // columns summed before they are added to the total: sums of sums round less

// W: float, uint16_t (float16) or Brain. The sums are those of the same weights in float32, to the last bit.
template <int MR, class W>
inline void float_tile(const W* w, const float* a, int64_t columns, int64_t count, float* out) {
  F8 total[MR][2];
  UNROLL for (int m = 0; m < MR; ++m) total[m][0] = total[m][1] = zero();
  for (int64_t begin = 0; begin < count; begin += kFloatRun) {
    const int64_t end = begin + kFloatRun < count ? begin + kFloatRun : count;
    F8 c[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) c[m][0] = c[m][1] = zero();
    for (int64_t k = begin; k < end; ++k) {
      const W* p = w + k * kPanel;
      if (MR == 1) prefetch(p + 4096 / sizeof(W));
      F8 w0 = load(p), w1 = load(p + 8);
      UNROLL for (int m = 0; m < MR; ++m) {
        F8 x = all(a[m * columns + k]);
        c[m][0] = fma(x, w0, c[m][0]);
        c[m][1] = fma(x, w1, c[m][1]);
      }
    }
    UNROLL for (int m = 0; m < MR; ++m) {
      total[m][0] = add(total[m][0], c[m][0]);
      total[m][1] = add(total[m][1], c[m][1]);
    }
  }
  UNROLL for (int m = 0; m < MR; ++m) {
    store(out + m * kPanel, total[m][0]);
    store(out + m * kPanel + 8, total[m][1]);
  }
}

#if HEADRACE_AVX2

// gcc re-associates integer sums, and then has more of them than registers; this keeps each where it is.
#define KEEP(a, b) asm("" : "+x"(a), "+x"(b))

inline __m256i wide(const void* four) {
  int32_t bits;
  std::memcpy(&bits, four, 4);
  return _mm256_set1_epi32(bits);
}

// Per group: 16 pairs of columns, each as [16 rows][2] bytes; then 16 scales.
template <int MR>
inline void int8_tile(const uint8_t* w, const int16_t* a, const float* scales, int64_t columns, int64_t count, float* out) {
  const int64_t groups = columns / kGroup;
  F8 f[MR][2];
  UNROLL for (int m = 0; m < MR; ++m) f[m][0] = f[m][1] = zero();
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt8Bytes) {
    __m256i c[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) c[m][0] = c[m][1] = _mm256_setzero_si256();
    if (MR == 1) UNROLL for (int p = 0; p < kInt8Bytes; p += 64) prefetch(w + 8 * kInt8Bytes + p);
    const int16_t* at = a + g * kGroup;
    UNROLL for (int p = 0; p < 16; ++p) {
      const __m128i* pair = reinterpret_cast<const __m128i*>(w + p * 32);
      __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair)), w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128(pair + 1));
      UNROLL for (int m = 0; m < MR; ++m) {
        __m256i x = wide(at + m * columns + p * 2);
        c[m][0] = _mm256_add_epi32(c[m][0], _mm256_madd_epi16(w0, x));
        c[m][1] = _mm256_add_epi32(c[m][1], _mm256_madd_epi16(w1, x));
        KEEP(c[m][0], c[m][1]);
      }
    }
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup);
    F8 s0 = load(half), s1 = load(half + 8);
    UNROLL for (int m = 0; m < MR; ++m) {
      F8 s = all(scales[m * groups + g]);
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
    const uint8_t* w, const int8_t* a, const float* scales, const float* sums, int64_t columns, int64_t count, float* out) {
  const int64_t groups = columns / kGroup;
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  F8 f[MR][2];
  UNROLL for (int m = 0; m < MR; ++m) f[m][0] = f[m][1] = zero();
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt4Bytes) {
    __m256i c[MR][2];
    UNROLL for (int m = 0; m < MR; ++m) c[m][0] = c[m][1] = _mm256_setzero_si256();
    if (MR == 1) UNROLL for (int p = 0; p < kInt4Bytes; p += 64) prefetch(w + 12 * kInt4Bytes + p);
    const int8_t* at = a + g * kGroup;
    UNROLL for (int p = 0; p < 4; ++p) {
      const __m256i* run = reinterpret_cast<const __m256i*>(w + p * 64);
      __m256i v0 = _mm256_loadu_si256(run), v1 = _mm256_loadu_si256(run + 1);
      __m256i w0 = _mm256_and_si256(v0, low), w1 = _mm256_and_si256(v1, low);
      UNROLL for (int m = 0; m < MR; ++m) {
        __m256i x = wide(at + m * columns + p * 8);
        c[m][0] = _mm256_add_epi16(c[m][0], _mm256_maddubs_epi16(w0, x));
        c[m][1] = _mm256_add_epi16(c[m][1], _mm256_maddubs_epi16(w1, x));
        KEEP(c[m][0], c[m][1]);
      }
      w0 = _mm256_and_si256(_mm256_srli_epi16(v0, 4), low);
      w1 = _mm256_and_si256(_mm256_srli_epi16(v1, 4), low);
      UNROLL for (int m = 0; m < MR; ++m) {
        __m256i x = wide(at + m * columns + p * 8 + 4);
        c[m][0] = _mm256_add_epi16(c[m][0], _mm256_maddubs_epi16(w0, x));
        c[m][1] = _mm256_add_epi16(c[m][1], _mm256_maddubs_epi16(w1, x));
        KEEP(c[m][0], c[m][1]);
      }
    }
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup / 2);
    F8 s0 = load(half), s1 = load(half + 8), m0 = load(half + 16), m1 = load(half + 24);
    UNROLL for (int m = 0; m < MR; ++m) {
      F8 s = all(scales[m * groups + g]), z = all(sums[m * groups + g]);
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

#else

template <int MR>
inline void int8_tile(const uint8_t* w, const int16_t* a, const float* scales, int64_t columns, int64_t count, float* out) {
  const int64_t groups = columns / kGroup;
  std::memset(out, 0, sizeof(float) * MR * kPanel);
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt8Bytes) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup);
    for (int m = 0; m < MR; ++m) {
      for (int row = 0; row < kPanel; ++row) {
        int32_t total = 0;
        for (int k = 0; k < kGroup; ++k) {
          total += static_cast<int8_t>(w[k / 2 * 32 + row * 2 + k % 2]) * a[m * columns + g * kGroup + k];
        }
        out[m * kPanel + row] += static_cast<float>(total) * (half_to_float(half[row]) * scales[m * groups + g]);
      }
    }
  }
}

template <int MR>
inline void int4_tile(
    const uint8_t* w, const int8_t* a, const float* scales, const float* sums, int64_t columns, int64_t count, float* out) {
  const int64_t groups = columns / kGroup;
  std::memset(out, 0, sizeof(float) * MR * kPanel);
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt4Bytes) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup / 2);
    for (int m = 0; m < MR; ++m) {
      for (int row = 0; row < kPanel; ++row) {
        int32_t total = 0;
        for (int k = 0; k < kGroup; ++k) {
          int byte = w[k / 8 * 64 + row * 4 + k % 4];
          total += (k % 8 < 4 ? byte & 15 : byte >> 4) * a[m * columns + g * kGroup + k];
        }
        float& to = out[m * kPanel + row];
        to += static_cast<float>(total) * (half_to_float(half[row]) * scales[m * groups + g]);
        to += half_to_float(half[kPanel + row]) * sums[m * groups + g];
      }
    }
  }
}

#endif

}  // namespace headrace::VARIANT
