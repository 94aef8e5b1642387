// The innermost loops of the matrix products: MR rows of activations times one panel of 16 weight rows.
//
// `a` has `columns` columns, of which the first `count` are summed. However many rows share a call, each row's sums are
// taken in the same order: integers within a group, where order does not matter, then groups from first to last. So a
// row's result does not depend on its company, nor on the instruction set's way to sum integers.
#pragma once

#include "simd16.h"
#include "types.h"

#if HEADRACE_AMX
#include "tiles_amx.h"
#elif HEADRACE_AVX512
#include "tiles_avx512.h"
#elif HEADRACE_AVX2
#include "tiles_avx2.h"
#else
#include "tiles_portable.h"
#endif

namespace headrace::VARIANT {

constexpr int64_t kFloatRun = 128;  // columns summed before they are added to the total: sums of sums round less

// W: float, uint16_t (float16) or Brain. The sums are those of the same weights in float32, to the last bit.
template <int MR, class W>
inline void float_tile(const W* w, const float* a, int64_t columns, int64_t count, float* out) {
  F16 total[MR];
  UNROLL for (int m = 0; m < MR; ++m) total[m] = zero16();
  for (int64_t begin = 0; begin < count; begin += kFloatRun) {
    const int64_t end = begin + kFloatRun < count ? begin + kFloatRun : count;
    F16 c[MR];
    UNROLL for (int m = 0; m < MR; ++m) c[m] = zero16();
    for (int64_t k = begin; k < end; ++k) {
      const W* p = w + k * kPanel;
      if (MR == 1) prefetch(p + 4096 / sizeof(W));
      const F16 weights = load16(p);
      UNROLL for (int m = 0; m < MR; ++m) c[m] = fma(all16(a[m * columns + k]), weights, c[m]);
    }
    UNROLL for (int m = 0; m < MR; ++m) total[m] = add(total[m], c[m]);
  }
  UNROLL for (int m = 0; m < MR; ++m) store(out + m * kPanel, total[m]);
}

}  // namespace headrace::VARIANT
