#define VARIANT blocks  // plain loops: a copy that waits for memory
#include "blocks.h"

#include "simd.h"
#include "types.h"

namespace headrace {
namespace {

using blocks::float_to_half;
using blocks::half_to_float;

// GGUF's types (ggml.h) that are packed as they are.
enum Gguf { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8, kQ4_K = 12 };
constexpr int kGroupsOfK = 8;  // of 32 columns in one block of a K type
constexpr int64_t kBytesOfQ4K = 144;

uint16_t half_at(const uint8_t* p) {
  uint16_t half;
  std::memcpy(&half, p, 2);
  return half;
}

void put_value(int k, int value, int row, uint8_t* out) {
  out[k / 8 * 64 + row * 4 + k % 4] |= k % 8 < 4 ? value : value << 4;
}

void put_line(uint16_t scale, uint16_t minimum, int row, uint8_t* out) {
  std::memcpy(out + kPanel * kGroup / 2 + 2 * row, &scale, 2);
  std::memcpy(out + kPanel * kGroup / 2 + 2 * kPanel + 2 * row, &minimum, 2);
}

// One group of one row into its panel. `from` is the row.
void pack_q8_0(const uint8_t* from, int64_t group, int row, uint8_t* out) {
  const uint8_t* block = from + group * 34;
  std::memcpy(out + kPanel * kGroup + 2 * row, block, 2);
  for (int k = 0; k < kGroup; ++k) out[k / 2 * 32 + row * 2 + k % 2] = block[2 + k];
}

// 16 bytes, whose low halves are columns 0..15 and whose high halves 16..31.
void put_nibbles(const uint8_t* values, int row, uint8_t* out) {
  for (int k = 0; k < kGroup; ++k) put_value(k, k < 16 ? values[k] & 15 : values[k - 16] >> 4, row, out);
}

void pack_q4_1(const uint8_t* from, int64_t group, int row, uint8_t* out) {
  const uint8_t* block = from + group * 20;
  put_nibbles(block + 4, row, out);
  put_line(half_at(block), half_at(block + 2), row, out);
}

// Its values are (q - 8) scale: a minimum of -8 scale, which is exact.
void pack_q4_0(const uint8_t* from, int64_t group, int row, uint8_t* out) {
  const uint8_t* block = from + group * 18;
  const uint16_t scale = half_at(block);
  put_nibbles(block + 2, row, out);
  put_line(scale, float_to_half(-8.0f * half_to_float(scale)), row, out);
}

// Eight groups share a scale and a minimum, by which their own, of 6 bits each, are multiplied; two groups share bytes.
void pack_q4_k(const uint8_t* from, int64_t group, int row, uint8_t* out) {
  const uint8_t* block = from + group / kGroupsOfK * kBytesOfQ4K;
  const uint8_t* six = block + 4;
  const int j = static_cast<int>(group % kGroupsOfK);
  const int scale = j < 4 ? six[j] & 63 : (six[j + 4] & 15) | six[j - 4] >> 6 << 4;
  const int minimum = j < 4 ? six[j + 4] & 63 : six[j + 4] >> 4 | six[j] >> 6 << 4;
  const uint8_t* values = block + 16 + j / 2 * kGroup;
  for (int k = 0; k < kGroup; ++k) put_value(k, j % 2 ? values[k] >> 4 : values[k] & 15, row, out);
  put_line(
      float_to_half(half_to_float(half_at(block)) * scale), float_to_half(-half_to_float(half_at(block + 2)) * minimum), row,
      out);
}

}  // namespace

void pack_blocks(
    int kind, const uint8_t* raw, int64_t row_bytes, const int32_t* order, int64_t rows, int64_t first_group, int64_t groups,
    uint8_t* out) {
  const int64_t group_bytes = kind == kQ8_0 ? kInt8Bytes : kInt4Bytes;
  auto* pack = kind == kQ8_0 ? pack_q8_0 : kind == kQ4_1 ? pack_q4_1 : kind == kQ4_0 ? pack_q4_0 : pack_q4_k;
  for (int64_t i = 0; i < rows; ++i) {
    if (order[i] < 0) continue;
    uint8_t* to = out + i / kPanel * groups * group_bytes;
    for (int64_t g = 0; g < groups; ++g) {
      pack(raw + order[i] * row_bytes, first_group + g, static_cast<int>(i % kPanel), to + g * group_bytes);
    }
  }
}

}  // namespace headrace
