// The functions that Python calls, and the choice of the instruction set.
#include <cstring>

#include "pool.h"
#include "types.h"

namespace headrace {

namespace portable {
extern const Kernels kernels;
}
#if HEADRACE_HAS_AVX2
namespace avx2 {
extern const Kernels kernels;
}
#endif

namespace {

bool has_avx2() {
#if HEADRACE_HAS_AVX2
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

const Kernels* chosen = &portable::kernels;

// GGUF's types (ggml.h) that are packed as they are.
enum Gguf { kQ4_0 = 2, kQ4_1 = 3, kQ8_0 = 8 };

// One group of one row of a GGUF tensor into its panel.
void pack_q8_0(const uint8_t* block, int row, uint8_t* out) {
  std::memcpy(out + kPanel * kGroup + 2 * row, block, 2);
  for (int k = 0; k < kGroup; ++k) out[k / 2 * 32 + row * 2 + k % 2] = block[2 + k];
}

// values: 16 bytes, whose low halves are columns 0..15 and whose high halves 16..31.
void pack_nibbles(const uint8_t* values, int row, uint8_t* out) {
  for (int k = 0; k < kGroup; ++k) {
    const int value = k < 16 ? values[k] & 15 : values[k - 16] >> 4;
    uint8_t& byte = out[k / 8 * 64 + row * 4 + k % 4];
    byte |= k % 8 < 4 ? value : value << 4;
  }
}

void pack_q4_1(const uint8_t* block, int row, uint8_t* out) {
  pack_nibbles(block + 4, row, out);
  std::memcpy(out + kPanel * kGroup / 2 + 2 * row, block, 2);
  std::memcpy(out + kPanel * kGroup / 2 + 2 * kPanel + 2 * row, block + 2, 2);
}

// -8 times a half-precision number, which is exact but where it would overflow.
uint16_t times_minus_8(uint16_t half) {
  const uint16_t sign = ~half & 0x8000;
  uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  for (int doubling = 0; doubling < 3; ++doubling) {
    if (exponent == 0) {
      mantissa <<= 1;
      if (mantissa & 1024) {
        mantissa &= 1023;
        exponent = 1;
      }
    } else if (exponent < 31) {
      if (++exponent == 31) mantissa = 0;
    }
  }
  return static_cast<uint16_t>(sign | exponent << 10 | mantissa);
}

// q4_0's values are (q - 8) scale: a minimum of -8 scale.
void pack_q4_0(const uint8_t* block, int row, uint8_t* out) {
  pack_nibbles(block + 2, row, out);
  uint16_t scale, minimum;
  std::memcpy(&scale, block, 2);
  minimum = times_minus_8(scale);
  std::memcpy(out + kPanel * kGroup / 2 + 2 * row, &scale, 2);
  std::memcpy(out + kPanel * kGroup / 2 + 2 * kPanel + 2 * row, &minimum, 2);
}

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

void make(const Call& call, int64_t rows) {
  const int64_t* a = call.arguments;
  switch (call.function) {
    case kLinear:
      return chosen->linear(
          pointer<float>(a[0]), rows, pointer<Norm>(a[1]), pointer<Matrix>(a[2]), static_cast<int>(a[3]),
          pointer<float>(a[4]), pointer<float>(a[5]));
    case kMlp:
      return chosen->mlp(
          pointer<float>(a[0]), rows, pointer<Norm>(a[1]), pointer<Matrix>(a[2]), pointer<Matrix>(a[3]),
          pointer<float>(a[4]), pointer<float>(a[5]));
    default:
      return chosen->attention(
          pointer<float>(a[0]), pointer<Heads>(a[1]), pointer<Tiles>(a[2]), pointer<void>(a[3]), pointer<float>(a[4]));
  }
}

}  // namespace
}  // namespace headrace

using namespace headrace;

#pragma GCC visibility push(default)
extern "C" {

// Chooses the instruction set: "avx2", "portable", or the best one for "". Returns the name of what is used.
const char* headrace_use(const char* wanted) {
#if HEADRACE_HAS_AVX2
  if (has_avx2() && std::strcmp(wanted, "portable") != 0) {
    chosen = &avx2::kernels;
    return "avx2";
  }
#endif
  (void)wanted;
  chosen = &portable::kernels;
  return "portable";
}

void headrace_threads(int count) { set_threads(count); }

// Packs rows of a GGUF tensor, `order[i]` being the row that comes as i-th (-1: a row of zeros), and of each row
// `blocks` blocks from `first_block`. `out` is zero.
void headrace_pack(
    int kind, const uint8_t* raw, int64_t row_bytes, const int32_t* order, int64_t rows, int64_t first_block, int64_t blocks,
    uint8_t* out) {
  const int64_t block_bytes = kind == kQ8_0 ? 34 : kind == kQ4_1 ? 20 : 18;
  const int64_t group_bytes = kind == kQ8_0 ? kInt8Bytes : kInt4Bytes;
  auto* pack = kind == kQ8_0 ? pack_q8_0 : kind == kQ4_1 ? pack_q4_1 : pack_q4_0;
  for (int64_t i = 0; i < rows; ++i) {
    if (order[i] < 0) continue;
    const uint8_t* from = raw + order[i] * row_bytes + first_block * block_bytes;
    uint8_t* to = out + i / kPanel * blocks * group_bytes;
    for (int64_t g = 0; g < blocks; ++g) pack(from + g * block_bytes, static_cast<int>(i % kPanel), to + g * group_bytes);
  }
}

void headrace_linear(
    const float* x, int64_t rows, const Norm* norm, const Matrix* parts, int count, const float* residual, float* out) {
  chosen->linear(x, rows, norm, parts, count, residual, out);
}

void headrace_mlp(
    const float* x, int64_t rows, const Norm* norm, const Matrix* gate_up, const Matrix* down, const float* residual,
    float* out) {
  chosen->mlp(x, rows, norm, gate_up, down, residual, out);
}

void headrace_attention(float* qkv, const Heads* heads, const Tiles* tiles, void* cache, float* out) {
  chosen->attention(qkv, heads, tiles, cache, out);
}

void headrace_scan(
    const float* logits, int64_t rows, int64_t stride, int64_t columns, int64_t* best, float* log_sums) {
  chosen->scan(logits, rows, stride, columns, best, log_sums);
}

void headrace_draw(
    const float* logits, int64_t rows, int64_t stride, int64_t columns, const float* temperatures, const double* numbers,
    int64_t* tokens) {
  chosen->draw(logits, rows, stride, columns, temperatures, numbers, tokens);
}

void headrace_threshold(
    const float* scores, const float* weights, int64_t rows, int64_t columns, const double* masses, float* thresholds) {
  chosen->threshold(scores, weights, rows, columns, masses, thresholds);
}

// Makes recorded calls, one after the other.
void headrace_run(const Call* calls, int64_t count, int64_t rows) {
  for (const Call* call = calls; call < calls + count; ++call) make(*call, rows);
}

}  // extern "C"
#pragma GCC visibility pop
