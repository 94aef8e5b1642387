// The operations of a layer. Of their rows the last `prompts` belong to prompts: AMX computes those in numbers of its own
// (prompts.h), the others do not tell them apart.
#pragma once

#include "attention.h"
#include "gemm.h"
#if HEADRACE_AMX
#include "prompt_attention.h"
#include "prompts.h"
#endif

namespace headrace::VARIANT {

#if HEADRACE_AMX
constexpr int kPromptTileRows = kQueries;
#else
constexpr int kPromptTileRows = 0;
inline bool takes_prompts(const Matrix*, int) { return false; }
template <class... Arguments>
void linear_of_prompts(Arguments...) {}
template <class... Arguments>
void mlp_of_prompts(Arguments...) {}
template <class... Arguments>
void attend_prompts(const Arguments&...) {}
#endif

inline int64_t width_of(const Matrix* parts, int count) {
  int64_t width = 0;
  for (int i = 0; i < count; ++i) width += parts[i].rows;
  return width;
}

inline void linear(
    const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* parts, int count, const float* residual,
    float* out) {
  const int64_t width = width_of(parts, count), plane = rows * width;
  if (!takes_prompts(parts, count)) prompts = 0;
  const int64_t others = rows - prompts;
  if (others) linear_of_rows(x, others, norm, parts, count, residual, out, plane);
  if (!prompts) return;
  linear_of_prompts(
      x + others * parts[0].columns, prompts, norm, parts, count, residual ? residual + others * width : nullptr,
      out + others * width, plane);
}

// out = [residual +] down(silu(gate) * up); gate and up are equally large.
inline void mlp(
    const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* gate_up, const Matrix* down,
    const float* residual, float* out) {
  const int64_t width = down->rows, plane = rows * width;
  if (!takes_prompts(gate_up, 2) || !takes_prompts(down, 1)) prompts = 0;
  const int64_t others = rows - prompts;
  if (others) mlp_of_rows(x, others, norm, gate_up, down, residual, out, plane);
  if (!prompts) return;
  mlp_of_prompts(
      x + others * gate_up->columns, prompts, norm, gate_up, down, residual ? residual + others * width : nullptr,
      out + others * width, plane);
}

inline void attention(float* qkv, const Heads* heads, const Tiles* tiles, void* memory, float* out) {
  const int others = tiles->count - tiles->prompts;
  if (!heads->half) return attention_of(qkv, *heads, *tiles, tiles->count, static_cast<float*>(memory), out);
  auto* halves = static_cast<uint16_t*>(memory);
  attention_of(qkv, *heads, *tiles, others, halves, out);
  if (tiles->prompts) attend_prompts(qkv, *heads, *tiles, cache_of(halves, *heads), out);
}

}  // namespace headrace::VARIANT
