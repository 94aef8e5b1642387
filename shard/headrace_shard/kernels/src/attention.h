// Rotary embedding, the KV cache, and attention over its blocks.
//
// A block holds, for each KV head, keys as [head_dim][16 tokens], so that 16 scores are summed side by side, and behind
// them values as [16 tokens][head_dim]: with 64 float16 dimensions one page of memory.
//
// A tile is a few queries of one sequence times the heads that share a KV head: every key that is read serves as many rows
// as the registers have sums for. Keys that a row may not see weigh exactly nothing, so the tile does not change a result.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "pool.h"
#include "simd16.h"
#include "types.h"

namespace headrace::VARIANT {

constexpr int kAttentionRows = kSums;
constexpr int kMaxHeadDim = 512;
constexpr int kRun = 8;  // dimensions between prefetches; divides head_dim
// Keys are taken in splits of a fixed size, whose results are added from the oldest to the newest: who computes which
// split does not show in the sum.
constexpr int kSplitBlocks = 8;
constexpr int kSplitKeys = kSplitBlocks * kBlock;

// One layer's cache, and the sizes that address it.
template <class T>
struct Cache {
  T* keys;
  T* values;
  int64_t head_stride;   // numbers from a head to the next in a block
  int64_t block_stride;  // from a block to the next
};

template <class T>
Cache<T> cache_of(T* memory, const Heads& h) {
  return {memory, memory + kBlock * h.head_dim, int64_t{2 * kBlock} * h.head_dim, h.block_stride};
}

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

// Rows of one tile against one KV head.
struct Rows {
  int count;
  const float* queries[kAttentionRows];
  float* outs[kAttentionRows];
  int64_t begins[kAttentionRows];  // first key that the row sees
  int64_t ends[kAttentionRows];    // one past the last
};

// Sums over some of the keys: the largest score, the sum of exp(score - largest), and as many sums of values with these
// weights.
struct Sums {
  float most[kAttentionRows];
  float weight[kAttentionRows];
  std::vector<float> values;  // [rows, head_dim]
};

// The blocks of one split, of one KV head: keys and, behind them, values.
template <class T>
struct Split {
  int64_t first;  // block
  int count;
  const T* blocks[kSplitBlocks];
};

template <class T>
Split<T> split_of(const Cache<T>& cache, const int32_t* table, int64_t number, int64_t end) {
  Split<T> split{number * kSplitBlocks, 0, {}};
  const int64_t last = std::min(split.first + kSplitBlocks, (end + kBlock - 1) / kBlock);
  for (int64_t b = split.first; b < last; ++b) split.blocks[split.count++] = cache.keys + table[b] * cache.block_stride;
  return split;
}

template <class T>
void prefetch_run(const T* from, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / static_cast<int64_t>(sizeof(T))) prefetch(from + i);
}

// Scores of the keys of B blocks. Prefetches the blocks `ahead`, where there are any, and values if they are wanted too.
template <int R, int B, class T>
void scores_of_blocks(
    const float* queries, const T* const* blocks, const T* const* ahead, bool cold, int dim, float* scores) {
  F16 c[B][R];
  UNROLL for (int b = 0; b < B; ++b) UNROLL for (int r = 0; r < R; ++r) c[b][r] = zero16();
  for (int run = 0; run < dim; run += kRun) {
    UNROLL for (int b = 0; b < B; ++b) {
      if (ahead[b]) prefetch_run(ahead[b] + run * kBlock, kRun * kBlock);
      if (cold) prefetch_run(blocks[b] + (dim + run) * kBlock, kRun * kBlock);
    }
    for (int d = run; d < run + kRun; ++d) {
      F16 keys[B];
      UNROLL for (int b = 0; b < B; ++b) keys[b] = load16(blocks[b] + d * kBlock);
      UNROLL for (int r = 0; r < R; ++r) {
        const F16 x = all16(queries[d * R + r]);
        UNROLL for (int b = 0; b < B; ++b) c[b][r] = fma(x, keys[b], c[b][r]);
      }
    }
  }
  UNROLL for (int b = 0; b < B; ++b) {
    UNROLL for (int r = 0; r < R; ++r) store(scores + r * kSplitKeys + b * kBlock, c[b][r]);
  }
}

// scores [R, kSplitKeys]. Reads ahead: of a split that nobody has read ahead its own blocks, else the next split's keys.
template <int R, class T>
void scores_of(const float* queries, const Split<T>& split, const Split<T>* next, bool cold, int dim, float* scores) {
  constexpr int kAtOnce = std::min(4, kAllSums / R);
  const T* ahead[kSplitBlocks] = {};
  const auto several = [&](auto count, int b) {
    scores_of_blocks<R, count()>(queries, split.blocks + b, ahead + b, cold, dim, scores + b * kBlock);
  };
  for (int b = 0; b < split.count; ++b) {
    if (cold) {
      ahead[b] = b + kAtOnce < split.count ? split.blocks[b + kAtOnce] : nullptr;
    } else if (next && b < next->count) {
      ahead[b] = next->blocks[b];
    }
  }
  int b = 0;
  for (; b + kAtOnce <= split.count; b += kAtOnce) several(std::integral_constant<int, kAtOnce>(), b);
  for (; b < split.count; ++b) several(std::integral_constant<int, 1>(), b);
}

// Scores to exp(score - largest), 0 outside [begin, end), of which some is inside; `length` is a multiple of 16.
inline void weigh(float* scores, int64_t length, int64_t begin, int64_t end, float& most, float& weight) {
  std::fill(scores, scores + begin, -INFINITY);
  std::fill(scores + end, scores + length, -INFINITY);
  F16 top = all16(-INFINITY);
  for (int64_t i = 0; i < length; i += 16) top = max(top, load16(scores + i));
  most = largest(top);
  F16 total = zero16();
  for (int64_t i = 0; i < length; i += 16) {
    const F16 e = exp(sub(load16(scores + i), all16(most)));
    total = add(total, e);
    store(scores + i, e);
  }
  weight = sum(total);
}

// Columns column .. column + 16 N of all rows' sums of values.
template <int R, int N, class T>
void mix(
    const Split<T>& split, const Split<T>* next, bool cold, int64_t keys, int dim, int column, const float* weights,
    float* out) {
  F16 c[R][N];
  UNROLL for (int r = 0; r < R; ++r) UNROLL for (int n = 0; n < N; ++n) c[r][n] = zero16();
  for (int b = 0; b < split.count; ++b) {
    const T* values = split.blocks[b] + kBlock * dim + column;
    const T* ahead = next && column == 0 && b < next->count ? next->blocks[b] : nullptr;
    const float* p = weights + b * kBlock;
    const int count = static_cast<int>(std::min<int64_t>(kBlock, keys - b * kBlock));
    for (int i = 0; i < count; ++i) {
      if (ahead && cold) prefetch_run(ahead + i * dim, dim);
      if (ahead) prefetch_run(ahead + (kBlock + i) * dim, dim);
      F16 v[N];
      UNROLL for (int n = 0; n < N; ++n) v[n] = load16(values + i * dim + n * 16);
      UNROLL for (int r = 0; r < R; ++r) {
        const F16 x = all16(p[r * kSplitKeys + i]);
        UNROLL for (int n = 0; n < N; ++n) c[r][n] = fma(x, v[n], c[r][n]);
      }
    }
  }
  UNROLL for (int r = 0; r < R; ++r) {
    UNROLL for (int n = 0; n < N; ++n) store(out + r * dim + column + n * 16, c[r][n]);
  }
}

template <int R, class T>
void attend_rows(
    const Rows& rows, const float* queries, const Split<T>& split, const Split<T>* next, bool cold, int dim, Sums& sums) {
  alignas(64) float scores[R * kSplitKeys];
  scores_of<R>(queries, split, next, cold, dim, scores);
  const int64_t base = split.first * kBlock, length = int64_t{split.count} * kBlock;
  int64_t keys = 0;
  for (int r = 0; r < R; ++r) {
    const int64_t begin = std::max<int64_t>(0, rows.begins[r] - base), end = std::min(length, rows.ends[r] - base);
    keys = std::max(keys, end);
    if (begin < end) {
      weigh(scores + r * kSplitKeys, length, begin, end, sums.most[r], sums.weight[r]);
    } else {
      std::fill_n(scores + r * kSplitKeys, length, 0.0f);
      sums.weight[r] = 0;
    }
  }
  int column = 0;
  float* out = sums.values.data();
  if constexpr (4 * R <= kAllSums) {
    for (; column + 64 <= dim; column += 64) mix<R, 4>(split, next, cold, keys, dim, column, scores, out);
  }
  if constexpr (2 * R <= kAllSums) {
    for (; column + 32 <= dim; column += 32) mix<R, 2>(split, next, cold, keys, dim, column, scores, out);
  }
  for (; column < dim; column += 16) mix<R, 1>(split, next, cold, keys, dim, column, scores, out);
}

template <class T, int R = kAttentionRows>
void attend(
    const Rows& rows, const float* queries, const Split<T>& split, const Split<T>* next, bool cold, int dim, Sums& sums) {
  if constexpr (R > 1) {
    if (rows.count < R) return attend<T, R - 1>(rows, queries, split, next, cold, dim, sums);
  }
  attend_rows<R>(rows, queries, split, next, cold, dim, sums);
}

// Adds the next split's sums of one row, [head_dim] values, to those of all splits before it.
inline void fold(float& most, float& weight, float* values, float next_most, float next_weight, const float* next, int dim) {
  if (next_weight == 0) return;  // the row sees nothing there
  if (weight == 0) {
    most = next_most;
    weight = next_weight;
    std::copy(next, next + dim, values);
    return;
  }
  const float top = std::max(most, next_most);
  const F8 old_share = exp(all(most - top)), new_share = exp(all(next_most - top));
  for (int d = 0; d < dim; d += 8) store(values + d, fma(load(next + d), new_share, mul(load(values + d), old_share)));
  float both[8];
  store(both, fma(all(next_weight), new_share, mul(all(weight), old_share)));
  weight = both[0];
  most = top;
}

inline void finish(const float* values, float weight, int dim, float* out) {
  const F8 share = all(1.0f / weight);
  for (int d = 0; d < dim; d += 8) store(out + d, mul(load(values + d), share));
}

// One tile's rows of some heads of one KV head.
template <class T>
struct Item {
  Rows rows;
  Cache<T> cache;
  const int32_t* table;
  int64_t first_split, last_split, end;  // splits first .. last - 1 hold all keys up to `end`

  Split<T> split(int64_t number) const { return split_of(cache, table, number, end); }
};

inline void pack_queries(const Rows& rows, int dim, float* packed) {  // [head_dim, rows]
  for (int d = 0; d < dim; ++d) {
    for (int r = 0; r < rows.count; ++r) packed[d * rows.count + r] = rows.queries[r][d];
  }
}

// Whole items, several a chunk: while one split is computed, the next is on its way from memory.
template <class T, class F>
void attend_by_items(int64_t items, const F& item_of, int dim) {
  const int64_t least = (items + kMaxChunks - 1) / kMaxChunks;
  const int64_t a_chunk = std::max(least, std::clamp<int64_t>(items / (4 * threads()), 1, 8));
  parallel(static_cast<int>((items + a_chunk - 1) / a_chunk), [&](int chunk) {
    Sums part;
    std::vector<float> packed(kAttentionRows * dim), values(kAttentionRows * dim);
    part.values.resize(kAttentionRows * dim);
    const int64_t last = std::min(items, (chunk + 1) * a_chunk);
    Item<T> item = item_of(chunk * a_chunk);
    Split<T> split = item.split(item.first_split);
    bool cold = true;
    for (int64_t number = chunk * a_chunk; number < last; ++number) {
      Item<T> following = number + 1 < last ? item_of(number + 1) : item;
      float most[kAttentionRows], weight[kAttentionRows] = {};
      pack_queries(item.rows, dim, packed.data());
      for (int64_t s = item.first_split; s < item.last_split; ++s) {
        const bool ends = s + 1 == item.last_split, is_last = ends && number + 1 == last;
        const Split<T> next = ends ? following.split(following.first_split) : item.split(s + 1);
        attend(item.rows, packed.data(), split, is_last ? nullptr : &next, cold, dim, part);
        for (int r = 0; r < item.rows.count; ++r) {
          fold(most[r], weight[r], &values[r * dim], part.most[r], part.weight[r], &part.values[r * dim], dim);
        }
        split = next;
        cold = false;
      }
      for (int r = 0; r < item.rows.count; ++r) finish(&values[r * dim], weight[r], dim, item.rows.outs[r]);
      item = following;
    }
  });
}

// Few items: their splits are computed side by side and then added in order, which gives the same bits.
template <class T, class F>
void attend_by_splits(int64_t items, const F& item_of, int dim) {
  std::vector<Item<T>> all_items;
  std::vector<std::pair<int64_t, int64_t>> work;  // (item, split)
  for (int64_t i = 0; i < items; ++i) {
    all_items.push_back(item_of(i));
    for (int64_t s = all_items[i].first_split; s < all_items[i].last_split; ++s) work.emplace_back(i, s);
  }
  std::vector<Sums> parts(work.size());
  const int64_t count = static_cast<int64_t>(work.size()), a_chunk = (count + kMaxChunks - 1) / kMaxChunks;
  parallel(static_cast<int>((count + a_chunk - 1) / a_chunk), [&](int chunk) {
    std::vector<float> packed(kAttentionRows * dim);
    for (int64_t w = chunk * a_chunk; w < std::min(count, (chunk + 1) * a_chunk); ++w) {
      const Item<T>& item = all_items[work[w].first];
      parts[w].values.resize(item.rows.count * dim);
      pack_queries(item.rows, dim, packed.data());
      attend<T>(item.rows, packed.data(), item.split(work[w].second), nullptr, true, dim, parts[w]);
    }
  });
  std::vector<float> values(kAttentionRows * dim);
  for (int64_t w = 0; w < count;) {
    const int64_t number = work[w].first;
    const Rows& rows = all_items[number].rows;
    float most[kAttentionRows], weight[kAttentionRows] = {};
    for (; w < count && work[w].first == number; ++w) {
      const Sums& part = parts[w];
      for (int r = 0; r < rows.count; ++r) {
        fold(most[r], weight[r], &values[r * dim], part.most[r], part.weight[r], &part.values[r * dim], dim);
      }
    }
    for (int r = 0; r < rows.count; ++r) finish(&values[r * dim], weight[r], dim, rows.outs[r]);
  }
}

// Writes all tokens into the cache and computes the first `count` tiles.
template <class T>
void attention_of(float* qkv, const Heads& h, const Tiles& t, int count, T* memory, float* out) {
  const int dim = h.head_dim, shared = h.heads / h.kv_heads;
  const int64_t stride = int64_t{h.heads + 2 * h.kv_heads} * dim;
  const Cache<T> cache = cache_of(memory, h);
  const int64_t head_stride = cache.head_stride;

  const int tokens = t.tokens, a_chunk = tokens < 4 ? tokens : std::max(1, tokens / (4 * threads()));
  parallel((tokens + a_chunk - 1) / a_chunk, [&](int chunk) {
    for (int i = chunk * a_chunk; i < std::min(tokens, (chunk + 1) * a_chunk); ++i) {
      write_token(qkv + i * stride, h, t, i, cache);
    }
  });

  if (count == 0) return;
  // Heads of one item: as many as fit beside the tile's queries.
  const int tallest = *std::max_element(t.counts, t.counts + count);
  const int heads = std::max(1, std::min(shared, kAttentionRows / tallest));
  const int parts = (shared + heads - 1) / heads, per_tile = h.kv_heads * parts;
  auto item_of = [&](int64_t number) {
    const int tile = static_cast<int>(number / per_tile), kv = number % per_tile / parts;
    const int begin = number % parts * heads, end = std::min(shared, begin + heads);
    Item<T> item{{}, {memory + kv * head_stride, nullptr, head_stride, cache.block_stride}, t.tables + t.starts[tile], 0, 0, 0};
    Rows& rows = item.rows;
    int64_t first = INT64_MAX;
    for (int i = 0; i < t.counts[tile]; ++i) {
      const int64_t token = t.firsts[tile] + i, position = t.positions[token];
      for (int head = kv * shared + begin; head < kv * shared + end; ++head, ++rows.count) {
        rows.queries[rows.count] = qkv + token * stride + head * dim;
        rows.outs[rows.count] = out + (token * h.heads + head) * dim;
        rows.begins[rows.count] = h.window ? std::max<int64_t>(0, position + 1 - h.window) : 0;
        rows.ends[rows.count] = position + 1;
        first = std::min(first, rows.begins[rows.count]);
        item.end = std::max(item.end, position + 1);
      }
    }
    item.first_split = first / kSplitKeys;
    item.last_split = (item.end + kSplitKeys - 1) / kSplitKeys;
    return item;
  };
  const int64_t items = int64_t{count} * per_tile;
  if (items < 4 * threads() && threads() > 1) {
    attend_by_splits<T>(items, item_of, dim);
  } else {
    attend_by_items<T>(items, item_of, dim);
  }
}

}  // namespace headrace::VARIANT
