// Sixteen floats at a time, as many as a panel has rows and a KV block has tokens: one register of AVX-512, else two of eight.
#pragma once

#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define HEADRACE_AVX512 1
#endif
#if HEADRACE_AVX512 && defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define HEADRACE_AMX 1
#endif

namespace headrace::VARIANT {

#if HEADRACE_AVX512

using F16 = __m512;

inline F16 zero16() { return _mm512_setzero_ps(); }
inline F16 all16(float x) { return _mm512_set1_ps(x); }
inline F16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline F16 load16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F16 load16(const Brain* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }  // b where one is NaN
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
inline F16 nearest(F16 x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F16 two_to(F16 whole) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127)), 23));
}
inline F16 zero_unless_above(F16 value, F16 x, F16 bound) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLE_UQ), value);  // a NaN stays one
}
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F8 low(F16 x) { return _mm512_castps512_ps256(x); }
inline F8 high(F16 x) { return _mm512_extractf32x8_ps(x, 1); }
constexpr int kSums = 12;  // sums of sixteen that the registers hold, twice, beside what is added to them
constexpr int kAllSums = 24;

#else

struct F16 {
  F8 low, high;
};

inline F16 zero16() { return {zero(), zero()}; }
inline F16 all16(float x) { return {all(x), all(x)}; }
template <class T>
inline F16 load16(const T* p) { return {load(p), load(p + 8)}; }
inline void store(float* p, F16 x) {
  store(p, x.low);
  store(p + 8, x.high);
}
inline F16 add(F16 a, F16 b) { return {add(a.low, b.low), add(a.high, b.high)}; }
inline F16 sub(F16 a, F16 b) { return {sub(a.low, b.low), sub(a.high, b.high)}; }
inline F16 div(F16 a, F16 b) { return {div(a.low, b.low), div(a.high, b.high)}; }
inline F16 max(F16 a, F16 b) { return {max(a.low, b.low), max(a.high, b.high)}; }
inline F16 min(F16 a, F16 b) { return {min(a.low, b.low), min(a.high, b.high)}; }
inline F16 nearest(F16 x) { return {nearest(x.low), nearest(x.high)}; }
inline F16 two_to(F16 whole) { return {two_to(whole.low), two_to(whole.high)}; }
inline F16 zero_unless_above(F16 value, F16 x, F16 bound) {
  return {zero_unless_above(value.low, x.low, bound.low), zero_unless_above(value.high, x.high, bound.high)};
}
inline F16 mul(F16 a, F16 b) { return {mul(a.low, b.low), mul(a.high, b.high)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
inline F8 low(F16 x) { return x.low; }
inline F8 high(F16 x) { return x.high; }
constexpr int kSums = 6;  // sums of sixteen that the registers hold beside what is added to them
constexpr int kAllSums = kSums;

#endif

inline float sum(F16 x) { return sum(add(low(x), high(x))); }
inline float largest(F16 x) { return largest(max(low(x), high(x))); }

template <class V>
V spread(float x);  // the same number in all places
template <>
inline F8 spread<F8>(float x) { return all(x); }
template <>
inline F16 spread<F16>(float x) { return all16(x); }

// exp by range reduction and a polynomial of degree 5 (Cephes, expf.c): relative error below 2e-7.
template <class V>
inline V exp(V given) {
  const auto constant = [](float x) { return spread<V>(x); };
  V x = min(constant(88.3f), max(constant(kExpLow), given));  // the constant first: a NaN goes through
  const V whole = nearest(mul(x, constant(1.44269504088896341f)));
  x = fma(whole, constant(-0.693359375f), x);
  x = fma(whole, constant(2.12194440e-4f), x);
  V y = constant(1.9875691500e-4f);
  y = fma(y, x, constant(1.3981999507e-3f));
  y = fma(y, x, constant(8.3334519073e-3f));
  y = fma(y, x, constant(4.1665795894e-2f));
  y = fma(y, x, constant(1.6666665459e-1f));
  y = fma(y, x, constant(5.0000001201e-1f));
  y = fma(y, mul(x, x), add(x, constant(1.0f)));
  return zero_unless_above(mul(y, two_to(whole)), given, constant(kExpLow));
}

template <class V>
inline V silu(V x) { return div(x, add(spread<V>(1.0f), exp(sub(spread<V>(0.0f), x)))); }

}  // namespace headrace::VARIANT
