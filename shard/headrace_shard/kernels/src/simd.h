// Eight floats at a time: AVX2 with FMA and F16C where the compiler was told that they exist, else plain loops.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HEADRACE_AVX2 1
#include <immintrin.h>
#endif

// gcc keeps accumulators in registers only if every loop over them is unrolled.
#define UNROLL _Pragma("GCC unroll 16")

namespace headrace::VARIANT {

// A bfloat16: the upper half of a float.
struct Brain {
  uint16_t bits;
};

constexpr float kLargestHalf = 65504.0f;
constexpr float kExpLow = -87.3f;  // below this exp is 0: masked scores must weigh nothing at all

#if HEADRACE_AVX2

using F8 = __m256;

inline F8 zero() { return _mm256_setzero_ps(); }
inline F8 all(float x) { return _mm256_set1_ps(x); }
inline F8 load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, F8 x) { _mm256_storeu_ps(p, x); }
inline F8 add(F8 a, F8 b) { return _mm256_add_ps(a, b); }
inline F8 sub(F8 a, F8 b) { return _mm256_sub_ps(a, b); }
inline F8 mul(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
inline F8 div(F8 a, F8 b) { return _mm256_div_ps(a, b); }
inline F8 max(F8 a, F8 b) { return _mm256_max_ps(a, b); }  // b where one is NaN
inline F8 min(F8 a, F8 b) { return _mm256_min_ps(a, b); }
inline F8 abs(F8 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline F8 fma(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
inline F8 load(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline void store(uint16_t* p, F8 x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, 0)); }
inline F8 load(const Brain* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
inline void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1); }

inline float sum(F8 v) {
  __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps(a, a, 1)));
}

inline float largest(F8 v) {
  __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  a = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps(a, a, 1)));
}

inline F8 nearest(F8 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F8 two_to(F8 whole) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
inline F8 zero_unless_above(F8 value, F8 x, F8 bound) {
  return _mm256_and_ps(value, _mm256_cmp_ps(x, bound, _CMP_NLE_UQ));  // a NaN stays one
}

#else

struct F8 {
  float v[8];
};

#define HEADRACE_EACH(expression)      \
  F8 r;                                \
  for (int i = 0; i < 8; ++i) r.v[i] = (expression); \
  return r

inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023, bits;
  if (exponent == 0) {
    float small = std::ldexp(float(mantissa), -24);
    return sign ? -small : small;
  }
  bits = sign | (exponent == 31 ? 255u : exponent + 112) << 23 | mantissa << 13;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  if (std::isnan(f)) return sign | 0x7e00;
  float a = std::fabs(f);
  if (a >= 65520.0f) return sign | 0x7c00;
  if (a < 6.103515625e-05f) return sign | uint16_t(std::nearbyint(std::ldexp(a, 24)));
  std::memcpy(&bits, &a, 4);
  bits += 0xfff + (bits >> 13 & 1);  // to the nearest, ties to even
  return sign | uint16_t((bits >> 13) - (112 << 10));
}

inline F8 zero() { return F8{}; }
inline F8 all(float x) { HEADRACE_EACH(x); }
inline F8 load(const float* p) { HEADRACE_EACH(p[i]); }
inline void store(float* p, F8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F8 add(F8 a, F8 b) { HEADRACE_EACH(a.v[i] + b.v[i]); }
inline F8 sub(F8 a, F8 b) { HEADRACE_EACH(a.v[i] - b.v[i]); }
inline F8 mul(F8 a, F8 b) { HEADRACE_EACH(a.v[i] * b.v[i]); }
inline F8 div(F8 a, F8 b) { HEADRACE_EACH(a.v[i] / b.v[i]); }
inline F8 max(F8 a, F8 b) { HEADRACE_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline F8 min(F8 a, F8 b) { HEADRACE_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline F8 abs(F8 a) { HEADRACE_EACH(std::fabs(a.v[i])); }
inline F8 fma(F8 a, F8 b, F8 c) { HEADRACE_EACH(a.v[i] * b.v[i] + c.v[i]); }
inline F8 load(const uint16_t* p) { HEADRACE_EACH(half_to_float(p[i])); }
inline F8 load(const Brain* p) {
  F8 r;
  for (int i = 0; i < 8; ++i) {
    const uint32_t bits = uint32_t{p[i].bits} << 16;
    std::memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline void store(uint16_t* p, F8 x) {
  for (int i = 0; i < 8; ++i) p[i] = float_to_half(x.v[i]);
}
inline void prefetch(const void*) {}
inline float sum(F8 a) {
  float total = 0;
  for (float x : a.v) total += x;
  return total;
}
inline float largest(F8 a) {
  float most = a.v[0];
  for (float x : a.v) most = most > x ? most : x;
  return most;
}
inline F8 nearest(F8 a) { HEADRACE_EACH(std::nearbyint(a.v[i])); }
inline F8 two_to(F8 whole) { HEADRACE_EACH(std::ldexp(1.0f, std::isnan(whole.v[i]) ? 0 : int(whole.v[i]))); }
inline F8 zero_unless_above(F8 value, F8 x, F8 bound) { HEADRACE_EACH(x.v[i] <= bound.v[i] ? 0.0f : value.v[i]); }

#undef HEADRACE_EACH

#endif

}  // namespace headrace::VARIANT
