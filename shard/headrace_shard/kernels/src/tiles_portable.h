// The integer tiles of tiles.h in plain loops.
#pragma once

#include "simd.h"
#include "types.h"

namespace headrace::VARIANT {

template <int MR>
inline void int8_tile(const uint8_t* w, const int16_t* a, const float* scales, int64_t rows, int64_t count, float* out) {
  std::memset(out, 0, sizeof(float) * MR * kPanel);
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt8Bytes) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup);
    for (int m = 0; m < MR; ++m) {
      for (int row = 0; row < kPanel; ++row) {
        int32_t total = 0;
        for (int k = 0; k < kGroup; ++k) {
          total += static_cast<int8_t>(w[k / 2 * 32 + row * 2 + k % 2]) * a[(g * rows + m) * kGroup + k];
        }
        out[m * kPanel + row] += static_cast<float>(total) * (half_to_float(half[row]) * scales[g * rows + m]);
      }
    }
  }
}

template <int MR>
inline void int4_tile(
    const uint8_t* w, const int8_t* a, const float* scales, const float* sums, int64_t rows, int64_t count, float* out) {
  std::memset(out, 0, sizeof(float) * MR * kPanel);
  for (int64_t g = 0; g < count / kGroup; ++g, w += kInt4Bytes) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(w + kPanel * kGroup / 2);
    for (int m = 0; m < MR; ++m) {
      for (int row = 0; row < kPanel; ++row) {
        int32_t total = 0;
        for (int k = 0; k < kGroup; ++k) {
          int byte = w[k / 8 * 64 + row * 4 + k % 4];
          total += (k % 8 < 4 ? byte & 15 : byte >> 4) * a[(g * rows + m) * kGroup + k];
        }
        float& to = out[m * kPanel + row];
        to += static_cast<float>(total) * (half_to_float(half[row]) * scales[g * rows + m]);
        to += half_to_float(half[kPanel + row]) * sums[g * rows + m];
      }
    }
  }
}

}  // namespace headrace::VARIANT
