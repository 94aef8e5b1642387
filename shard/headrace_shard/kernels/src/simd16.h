// Sixteen floats at a time, as many as a panel has rows and a KV block has tokens: one register of AVX-512, else two of eight.
#pragma once

#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define HEADRACE_AVX512 1
#endif

namespace headrace::VARIANT {

#if HEADRACE_AVX512

using F16 = __m512;

inline F16 zero16() { return _mm512_setzero_ps(); }
// gcc makes a load a part of the operation that wants it. Where that is one of 512 bits, both are slower than one by one.
#define IN_REGISTER(x) asm("" : "+v"(x))

inline F16 all16(float x) {
  F16 lanes = _mm512_set1_ps(x);
  IN_REGISTER(lanes);
  return lanes;
}
inline F16 load16(const float* p) { return _mm512_loadu_ps(p); }
inline F16 load16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline F16 load16(const Brain* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
constexpr int kSums = 12;  // sums of sixteen that the registers hold, twice, beside what is added to them

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
inline F16 mul(F16 a, F16 b) { return {mul(a.low, b.low), mul(a.high, b.high)}; }
inline F16 fma(F16 a, F16 b, F16 c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
constexpr int kSums = 6;  // sums of sixteen that the registers hold beside what is added to them

#endif

}  // namespace headrace::VARIANT
