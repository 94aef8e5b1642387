// Rotary embedding, the KV cache, and attention over its blocks.
//
// A block holds, for each KV head, keys as [head_dim][16 tokens], so that 16 scores are summed side by side, and behind
// them values as [16 tokens][head_dim]: with 64 float16 dimensions one page of memory.
//
// A tile is a few queries of one sequence times the heads that share a KV head: every key that is read serves up to six
// rows. Keys that a row may not see weigh exactly nothing, so the tile does not change a result.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"
#include "types.h"

namespace headrace::VARIANT {

constexpr int kAttentionRows = 6;
constexpr int kMaxHeadDim = 512;
constexpr int kRun = 8;  // dimensions between prefetches; divides head_dim

// One layer's cache, and the sizes that address it.
template <class T>
struct Cache {
  T* keys;
  T* values;
  int64_t head_stride;   // numbers from a head to the next in a block
  int64_t block_stride;  // from a block to the next
};

// Su et al. 2021 in the half-split layout of `transformers`; head_dim / 2 is a multiple of 8.
inline void rotate(float* x, const float* cosines, const float* sines, int half, float scale) {
  for (int d = 0; d < half; d += 8) {
    F8 a = load(x + d), b = load(x + half + d), c = load(cosines + d), s = load(sines + d);
    store(x + d, mul(all(scale), sub(mul(a, c), mul(b, s))));
    store(x + half + d, mul(all(scale), add(mul(b, c), mul(a, s))));
  }
}

// Numbers as the cache keeps them. What float16 cannot hold becomes its largest number, not infinity.
inline void convert(const float* x, float* out, int count) { std::memcpy(out, x, sizeof(float) * count); }
inline void convert(const float* x, uint16_t* out, int count) {
  for (int i = 0; i < count; i += 8) store(out + i, min(all(kLargestHalf), max(all(-kLargestHalf), load(x + i))));
}

// Rotates q (and scales it) and k of one token in place, writes k and v into the cache.
template <class T>
void write_token(float* row, const Heads& h, const Tiles& t, int64_t token, const Cache<T>& cache) {
  const int dim = h.head_dim, half = dim / 2;
  const int64_t position = t.positions[token];
  const float *cosines = t.cosines + position * half, *sines = t.sines + position * half;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  for (int i = 0; i < h.heads; ++i) rotate(row + i * dim, cosines, sines, half, scale);
  const int64_t slot = t.slots[token], block = slot / kBlock, place = slot % kBlock;
  T numbers[kMaxHeadDim];
  for (int i = 0; i < h.kv_heads; ++i) {
    float* key = row + (h.heads + i) * dim;
    rotate(key, cosines, sines, half, 1.0f);
    convert(key, numbers, dim);
    const int64_t at = block * cache.block_stride + i * cache.head_stride;
    for (int d = 0; d < dim; ++d) cache.keys[at + d * kBlock + place] = numbers[d];
    convert(row + (h.heads + h.kv_heads + i) * dim, cache.values + at + place * dim, dim);
  }
}

// R rows of one tile against one KV head.
struct Rows {
  const float* queries[kAttentionRows];
  float* outs[kAttentionRows];
  int64_t begins[kAttentionRows];  // first key that the row sees
  int64_t ends[kAttentionRows];    // one past the last
};

template <int R, class T>
void scores_of(
    const Rows& rows, const Cache<T>& cache, const int32_t* table, int64_t first, int64_t last, int dim, float* scores) {
  static thread_local std::vector<float> packed;  // queries as [head_dim][R]
  if (packed.size() < static_cast<size_t>(dim) * R) packed.resize(dim * kAttentionRows);
  for (int d = 0; d < dim; ++d) {
    for (int r = 0; r < R; ++r) packed[d * R + r] = rows.queries[r][d];
  }
  const float* q = packed.data();
  const int64_t length = (last - first) * kBlock;
  for (int64_t b = first; b < last; ++b) {
    const T* keys = cache.keys + table[b] * cache.block_stride;
    const T* values = cache.values + table[b] * cache.block_stride;
    const T* next = cache.keys + table[b + 1 < last ? b + 1 : b] * cache.block_stride;
    F8 c[R][2];
    UNROLL for (int r = 0; r < R; ++r) c[r][0] = c[r][1] = zero();
    for (int run = 0; run < dim; run += kRun) {
      // The next keys, and these tokens' values, which are wanted as soon as all scores are there.
      for (int64_t i = 0; i < kRun * kBlock; i += 64 / static_cast<int64_t>(sizeof(T))) {
        prefetch(next + run * kBlock + i);
        prefetch(values + run * kBlock + i);
      }
      for (int d = run; d < run + kRun; ++d) {
        F8 k0 = load(keys + d * kBlock), k1 = load(keys + d * kBlock + 8);
        UNROLL for (int r = 0; r < R; ++r) {
          F8 x = all(q[d * R + r]);
          c[r][0] = fma(x, k0, c[r][0]);
          c[r][1] = fma(x, k1, c[r][1]);
        }
      }
    }
    UNROLL for (int r = 0; r < R; ++r) {
      store(scores + r * length + (b - first) * kBlock, c[r][0]);
      store(scores + r * length + (b - first) * kBlock + 8, c[r][1]);
    }
  }
}

// Scores to exp(score - largest), 0 outside [begin, end); returns 1 / their sum. `length` is a multiple of 16.
inline float weigh(float* scores, int64_t length, int64_t begin, int64_t end) {
  std::fill(scores, scores + begin, -INFINITY);
  std::fill(scores + end, scores + length, -INFINITY);
  F8 most = all(-INFINITY);
  for (int64_t i = 0; i < length; i += 8) most = max(most, load(scores + i));
  F8 shift = all(largest(most)), total = zero();
  for (int64_t i = 0; i < length; i += 8) {
    F8 e = exp(sub(load(scores + i), shift));
    total = add(total, e);
    store(scores + i, e);
  }
  return 1.0f / sum(total);
}

// Columns column .. column + 8 N of all rows' outputs.
template <int R, int N, class T>
void mix(
    const Rows& rows, const Cache<T>& cache, const int32_t* table, int64_t first, int64_t end, int dim, int column,
    const float* weights, int64_t length, const float* shares) {
  F8 c[R][N];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int n = 0; n < N; ++n) c[r][n] = zero();
  for (int64_t b = first; b * kBlock < end; ++b) {
    const T* values = cache.values + table[b] * cache.block_stride + column;
    const float* p = weights + (b - first) * kBlock;
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - b * kBlock));
    for (int i = 0; i < count; ++i) {
      F8 v[N];
      UNROLL for (int n = 0; n < N; ++n) v[n] = load(values + i * dim + n * 8);
      UNROLL for (int r = 0; r < R; ++r) {
        F8 x = all(p[r * length + i]);
        UNROLL for (int n = 0; n < N; ++n) c[r][n] = fma(x, v[n], c[r][n]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int n = 0; n < N; ++n) store(rows.outs[r] + column + n * 8, mul(c[r][n], all(shares[r])));
  }
}

template <int R, class T>
void attend(const Rows& rows, const Cache<T>& cache, const int32_t* table, int dim) {
  const int64_t end = *std::max_element(rows.ends, rows.ends + R);
  const int64_t first = *std::min_element(rows.begins, rows.begins + R) / kBlock, last = (end + kBlock - 1) / kBlock;
  const int64_t length = (last - first) * kBlock;
  static thread_local std::vector<float> scratch;
  if (scratch.size() < static_cast<size_t>(length * R)) scratch.resize(length * R * 2);
  float* scores = scratch.data();
  scores_of<R>(rows, cache, table, first, last, dim, scores);
  float shares[R];
  for (int r = 0; r < R; ++r) {
    shares[r] = weigh(scores + r * length, length, rows.begins[r] - first * kBlock, rows.ends[r] - first * kBlock);
  }
  int column = 0;
  if (R <= 3) {
    for (; column + 32 <= dim; column += 32) mix<R, 4>(rows, cache, table, first, end, dim, column, scores, length, shares);
  }
  for (; column < dim; column += 16) mix<R, 2>(rows, cache, table, first, end, dim, column, scores, length, shares);
}

template <class T>
void attend(int count, const Rows& rows, const Cache<T>& cache, const int32_t* table, int dim) {
  switch (count) {
    case 1: return attend<1>(rows, cache, table, dim);
    case 2: return attend<2>(rows, cache, table, dim);
    case 3: return attend<3>(rows, cache, table, dim);
    case 4: return attend<4>(rows, cache, table, dim);
    case 5: return attend<5>(rows, cache, table, dim);
    default: return attend<6>(rows, cache, table, dim);
  }
}

template <class T>
void attention_of(float* qkv, const Heads& h, const Tiles& t, T* memory, float* out) {
  const int dim = h.head_dim, shared = h.heads / h.kv_heads;
  const int64_t stride = int64_t{h.heads + 2 * h.kv_heads} * dim;
  const int64_t head_stride = int64_t{2 * kBlock} * dim;
  const Cache<T> cache{memory, memory + kBlock * dim, head_stride, head_stride * h.kv_heads};

  const int tokens = t.tokens, a_chunk = tokens < 4 ? tokens : std::max(1, tokens / (4 * threads()));
  parallel((tokens + a_chunk - 1) / a_chunk, [&](int chunk) {
    for (int i = chunk * a_chunk; i < std::min(tokens, (chunk + 1) * a_chunk); ++i) {
      write_token(qkv + i * stride, h, t, i, cache);
    }
  });

  // Heads of one item: as many as fit beside the tile's queries, or one where items are too few to keep all threads busy.
  const int tallest = *std::max_element(t.counts, t.counts + t.count);
  int heads = std::max(1, std::min(shared, kAttentionRows / tallest));
  if (t.count * h.kv_heads < 4 * threads() && threads() > 1) heads = 1;
  const int splits = (shared + heads - 1) / heads, per_tile = h.kv_heads * splits;
  auto one = [&](int item) {
    const int tile = item / per_tile, kv = item % per_tile / splits, begin = item % splits * heads;
    const int end = std::min(shared, begin + heads);
    Rows rows;
    int count = 0;
    for (int i = 0; i < t.counts[tile]; ++i) {
      const int64_t token = t.firsts[tile] + i, position = t.positions[token];
      for (int head = kv * shared + begin; head < kv * shared + end; ++head, ++count) {
        rows.queries[count] = qkv + token * stride + head * dim;
        rows.outs[count] = out + (token * h.heads + head) * dim;
        rows.begins[count] = h.window ? std::max<int64_t>(0, position + 1 - h.window) : 0;
        rows.ends[count] = position + 1;
      }
    }
    Cache<T> mine{cache.keys + kv * head_stride, cache.values + kv * head_stride, head_stride, cache.block_stride};
    attend(count, rows, mine, t.tables + t.starts[tile], dim);
  };
  const int64_t items = int64_t{t.count} * per_tile, most = kMaxChunks;
  const int64_t together = (items + most - 1) / most;
  parallel(static_cast<int>((items + together - 1) / together), [&](int chunk) {
    for (int64_t i = chunk * together; i < std::min(items, (chunk + 1) * together); ++i) one(static_cast<int>(i));
  });
}

inline void attention(float* qkv, const Heads* heads, const Tiles* tiles, void* cache, float* out) {
  if (heads->half) {
    attention_of(qkv, *heads, *tiles, static_cast<uint16_t*>(cache), out);
  } else {
    attention_of(qkv, *heads, *tiles, static_cast<float*>(cache), out);
  }
}

}  // namespace headrace::VARIANT
