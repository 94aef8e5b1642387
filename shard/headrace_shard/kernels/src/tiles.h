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
constexpr int kFloatRows = 6, kFloatPanels = 4;  // of a tile of floats, at most; rows times panels are no more than kAllSums

constexpr int64_t kStreamAhead = 512;  // bytes of a panel that is read once: the CPU's own reading ahead goes on from there

// What a tile reads ahead: from so many bytes behind its own weights on, some bytes for each column.
struct Ahead {
  int64_t bytes;
  int64_t column_bytes;
};

// R rows times P panels; out [P, stride], added to what is there unless these columns are the first. W: float, uint16_t
// (float16) or Brain. The sums are those of the same weights in float32, to the last bit.
template <int P, int R, class W>
inline void float_tile(
    const uint8_t* const* panels, Ahead ahead, const float* a, int64_t columns, int64_t count, bool first, float* out,
    int64_t stride) {
  F16 c[P][R];
  UNROLL for (int p = 0; p < P; ++p) UNROLL for (int r = 0; r < R; ++r) c[p][r] = zero16();
  const auto add_column = [&](int64_t k) {
    const auto weights_of = [&](int p) { return load16(reinterpret_cast<const W*>(panels[p]) + k * kPanel); };
    if constexpr (P < R) {  // of the two, what is less stays in registers
      F16 weights[P];
      UNROLL for (int p = 0; p < P; ++p) weights[p] = weights_of(p);
      UNROLL for (int r = 0; r < R; ++r) {
        const F16 x = all16(a[r * columns + k]);
        UNROLL for (int p = 0; p < P; ++p) c[p][r] = fma(x, weights[p], c[p][r]);
      }
    } else {
      F16 x[R];
      UNROLL for (int r = 0; r < R; ++r) x[r] = all16(a[r * columns + k]);
      UNROLL for (int p = 0; p < P; ++p) {
        const F16 weights = weights_of(p);
        UNROLL for (int r = 0; r < R; ++r) c[p][r] = fma(x[r], weights, c[p][r]);
      }
    }
  };
  const auto read_ahead = [&](int64_t k) {
    UNROLL for (int p = 0; p < P; ++p) prefetch(panels[p] + ahead.bytes + k * ahead.column_bytes);
  };
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    read_ahead(k);
    if (ahead.column_bytes > 16) UNROLL for (int i = 1; i < 4; ++i) read_ahead(k + i);
    for (int i = 0; i < 4; ++i) add_column(k + i);
  }
  for (; k < count; ++k) add_column(k);
  UNROLL for (int p = 0; p < P; ++p) {
    UNROLL for (int r = 0; r < R; ++r) {
      float* const to = out + p * stride + r * kPanel;
      store(to, first ? c[p][r] : add(load16(to), c[p][r]));
    }
  }
}

}  // namespace headrace::VARIANT
