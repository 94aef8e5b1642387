// What Python passes by pointer; kernels/library.py declares the same.
#pragma once

#include <cstdint>

namespace headrace {

constexpr int kPanel = 16;  // rows of a weight matrix that lie side by side
constexpr int kGroup = 32;  // columns that share a scale
constexpr int kBlock = 16;  // tokens of a KV block

enum Format : int32_t { kFloat32 = 0, kInt8 = 1, kInt4 = 2, kBFloat16 = 3, kFloat16 = 4 };
constexpr int kFormats = 5;

// Bytes of one panel and group: int8 has 16 x 32 values and 16 half-precision scales, int4 half as many bytes of values,
// 16 scales and 16 minima.
constexpr int64_t kInt8Bytes = kPanel * kGroup + 2 * kPanel;
constexpr int64_t kInt4Bytes = kPanel * kGroup / 2 + 4 * kPanel;

// Bytes of a panel [columns, 16 rows].
inline int64_t panel_bytes_of(int32_t format, int64_t columns) {
  switch (format) {
    case kInt8: return columns / kGroup * kInt8Bytes;
    case kInt4: return columns / kGroup * kInt4Bytes;
    case kFloat32: return columns * kPanel * 4;
    default: return columns * kPanel * 2;
  }
}

// A weight matrix [rows, columns] in panels of 16 rows, the last one filled up with zeros.
struct Matrix {
  int32_t format;
  int32_t rows;
  int64_t columns;
  const uint8_t* panels;
  const float* bias;  // [rows], or null
  // Columns are summed in four runs, of which some may be empty: up to breaks[0], to breaks[1], to breaks[2], to the end.
  // A product is (first + second) + (third + fourth), so that ranks that hold some of the runs agree with one that has all.
  int64_t breaks[3];
  int32_t apart;  // the two halves of the product are wanted, not their sum

  int panel_count() const { return (rows + kPanel - 1) / kPanel; }
  int64_t panel_bytes() const { return panel_bytes_of(format, columns); }
};

// Rows of a matrix as a file holds them: kFloat32, kBFloat16 or kFloat16.
struct Values {
  int32_t format;
  int64_t rows;
  int64_t columns;
  int64_t row_bytes;  // from one row to the next
  const uint8_t* data;
};

struct Norm {
  const float* weight;
  float epsilon;
};

// Which tokens attend to what. Tile i: `counts[i]` consecutive tokens from `firsts[i]`, all of one sequence, whose block
// numbers begin at tables + starts[i].
struct Tiles {
  int32_t count;
  int32_t prompts;  // the last so many tiles are for `attend_prompts`, and as tall as Kernels::prompt_tile_rows allows
  int32_t tokens;
  const int32_t* firsts;
  const int32_t* counts;
  const int64_t* starts;
  const int32_t* tables;
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens] place of each token in the cache
  const float* cosines;      // [positions, head_dim / 2]
  const float* sines;
};

struct Heads {
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t window;  // 0: none
  int32_t half;    // the cache holds float16, else float32
  int64_t block_stride;  // numbers from a block of the cache to the next
};

// A call of one of the kernels, recorded to be made again with other numbers of rows: arguments in the kernel's order, these
// left out. An `out` that is null is this rank's part of the sum that follows.
enum Function : int64_t { kLinear = 0, kMlp = 1, kAttention = 2, kSum = 3 };
struct Call {
  int64_t function;
  int64_t arguments[6];
};

// The kernels of one instruction set.
struct Kernels {
  int32_t tile_rows;  // pairs of a query and a head that share what attention reads
  int32_t prompt_tile_rows;  // the same in tiles of prompts; 0: these are not told apart
  // Of the rows the last `prompts` are those of prompts.
  void (*linear)(
      const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* parts, int count,
      const float* residual, float* out);
  void (*mlp)(
      const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* gate_up, const Matrix* down,
      const float* residual, float* out);
  void (*pack)(const Values* values, int32_t format, uint8_t* out);
  void (*attention)(float* qkv, const Heads* heads, const Tiles* tiles, void* cache, float* out);
  void (*scan)(const float* logits, int64_t rows, int64_t stride, int64_t columns, int64_t* best, float* log_sums);
  void (*draw)(
      const float* logits, int64_t rows, int64_t stride, int64_t columns, const float* temperatures, const double* numbers,
      int64_t* tokens);
  void (*mask)(
      float* logits, const int64_t* places, int64_t count, int64_t stride, int64_t columns, const uint32_t* bits, int64_t words);
  void (*threshold)(
      const float* scores, const float* weights, int64_t rows, int64_t columns, const double* masses, float* thresholds);
};

}  // namespace headrace
