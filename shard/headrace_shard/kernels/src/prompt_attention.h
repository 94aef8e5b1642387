// Attention of a prompt's rows for AMX: scores and mixed values are sums of tiles, in bfloat16 as the products of prompts.h.
//
// A tile of Tiles is here as many queries as share what it costs to make keys and values bfloat16. As in attention.h splits
// of keys have a fixed size and are added from the oldest to the newest, and keys that a row may not see weigh nothing, so
// that the tile does not change a row's result.
#pragma once

#include "attention.h"
#include "prompts.h"

namespace headrace::VARIANT {

constexpr int kQueryTiles = 6;  // of sixteen rows, a query's head each
constexpr int kQueries = kQueryTiles * kAmxRows;
constexpr int kDimTiles = kMaxHeadDim / kGroup;

// What the rows of an item read of one split: keys as [blocks, dim / 32] tiles of 32 dimensions x 16 keys, values as
// [blocks / 2, dim / 16] tiles of 32 keys x 16 dimensions.
struct WideSplit {
  BrainTile keys[kSplitBlocks * kDimTiles];
  BrainTile values[kSplitBlocks * kDimTiles];
};

inline __m512i both_halves(const uint16_t* first, const uint16_t* second) {
  return side_by_side(mul(load16(first), all16(kHalfUp)), mul(load16(second), all16(kHalfUp)));
}

// `count` keys, behind which there may be anything.
inline void widen(const Split<uint16_t>& split, int64_t count, int dim, WideSplit& out) {
  static constexpr uint16_t kNone[kMaxHeadDim] = {};
  for (int b = 0; b < split.count; ++b) {
    const uint16_t *keys = split.blocks[b], *values = keys + kBlock * dim;
    for (int d = 0; d < dim; d += 2) {
      const __m512i pair = both_halves(keys + d * kBlock, keys + (d + 1) * kBlock);
      _mm512_store_si512(out.keys[b * (dim / kGroup) + d / kGroup].values[d % kGroup / 2], pair);
    }
    for (int i = 0; i < kBlock; i += 2) {
      auto row = [&](int j) { return b * kBlock + j < count ? values + j * dim : kNone; };
      const uint16_t *first = row(i), *second = row(i + 1);
      for (int d = 0; d < dim; d += 16) {
        const __m512i pair = both_halves(first + d, second + d);
        _mm512_store_si512(out.values[b / 2 * (dim / 16) + d / 16].values[b % 2 * 8 + i / 2], pair);
      }
    }
  }
  if (split.count % 2) {
    for (int d = 0; d < dim / 16; ++d) {
      std::memset(out.values[split.count / 2 * (dim / 16) + d].values[8], 0, sizeof(BrainTile) / 2);
    }
  }
}

// out (16 rows, `stride` floats apart) of N tiles side by side: a [depth] times w(depth, tile).
template <int N, class W>
inline void tiles_of_row(const BrainTile* a, int depth, const W& w, float* out, int64_t stride) {
  static_assert(N == 1 || N == 2 || N == 4);
  _tile_zero(0);
  if (N > 1) _tile_zero(1);
  if (N > 2) _tile_zero(2);
  if (N > 2) _tile_zero(3);
  for (int d = 0; d < depth; ++d) {
    _tile_loadd(4, a + d, 64);
    _tile_loadd(5, w(d, 0), 64);
    if (N > 1) _tile_loadd(6, w(d, 1), 64);
    if (N > 2) _tile_loadd(7, w(d, 2), 64);
    _tile_dpbf16ps(0, 4, 5);
    if (N > 2) _tile_loadd(5, w(d, 3), 64);
    if (N > 1) _tile_dpbf16ps(1, 4, 6);
    if (N > 2) _tile_dpbf16ps(2, 4, 7);
    if (N > 2) _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, out, sizeof(float) * stride);
  if (N > 1) _tile_stored(1, out + 16, sizeof(float) * stride);
  if (N > 2) _tile_stored(2, out + 32, sizeof(float) * stride);
  if (N > 2) _tile_stored(3, out + 48, sizeof(float) * stride);
}

// out [16, `stride`] of `count` such tiles.
template <class W>
inline void all_tiles_of_row(const BrainTile* a, int depth, int count, const W& w, float* out, int64_t stride) {
  asm volatile("" ::: "memory");  // gcc's intrinsics do not say that a tile is loaded from memory, nor that one is stored
  int at = 0;
  auto rest = [&](int d, int i) { return w(d, at + i); };
  for (; at + 4 <= count; at += 4) tiles_of_row<4>(a, depth, rest, out + at * 16, stride);
  for (; at + 2 <= count; at += 2) tiles_of_row<2>(a, depth, rest, out + at * 16, stride);
  if (at < count) tiles_of_row<1>(a, depth, rest, out + at * 16, stride);
  asm volatile("" ::: "memory");
}

constexpr float kNothing = -3e38f;  // the largest of no scores

// Scores of a row, of which [begin, end) are seen, to weights 2^(score - largest) in row m of `weights`; 2 kPairs blocks.
template <int kPairs>
inline void weigh_row(const float* scores, int begin, int end, int m, BrainTile* weights, float& most, float& weight) {
  F16 e[2 * kPairs];
  __mmask16 seen[2 * kPairs];
  const __m512i count = _mm512_set1_epi32(end - begin);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i place = _mm512_sub_epi32(lanes, _mm512_set1_epi32(begin));
  F16 top = all16(kNothing);
  UNROLL for (int b = 0; b < 2 * kPairs; ++b) {
    seen[b] = _mm512_cmplt_epu32_mask(place, count);
    place = _mm512_add_epi32(place, _mm512_set1_epi32(kBlock));
    e[b] = load16(scores + b * kBlock);
    top = _mm512_mask_max_ps(top, seen[b], top, e[b]);
  }
  most = _mm512_reduce_max_ps(top);
  const F16 least = all16(-126), base = all16(-most * kLog2e);
  F16 total = zero16();
  UNROLL for (int b = 0; b < 2 * kPairs; ++b) {
    e[b] = _mm512_maskz_mov_ps(seen[b], two_to_any(max(least, fma(e[b], all16(kLog2e), base))));
    total = add(total, e[b]);
  }
  UNROLL for (int p = 0; p < kPairs; ++p) {
    _mm512_store_si512(weights[p].values[m], (__m512i)_mm512_cvtne2ps_pbh(e[2 * p + 1], e[2 * p]));
  }
  weight = _mm512_reduce_add_ps(total);
}

template <int kPairs = kSplitBlocks / 2>
inline void weigh_rows(
    const float* scores, int pairs, const int* begins, const int* ends, int rows, BrainTile* weights, float* most,
    float* weight) {
  if constexpr (kPairs > 1) {
    if (pairs < kPairs) return weigh_rows<kPairs - 1>(scores, pairs, begins, ends, rows, weights, most, weight);
  }
  for (int m = 0; m < rows; ++m) {
    weigh_row<kPairs>(scores + m * kSplitKeys, begins[m], ends[m], m, weights, most[m], weight[m]);
  }
}

// Adds the next split's sums [16, dim] to those of all splits before it; exactly nothing for rows that see nothing there.
inline void fold_rows(
    float* most, float* weight, float* values, const float* next_most, const float* next_weight, const float* next, int rows,
    int dim) {
  const F16 one = all16(1), before = load16(most), now = load16(next_most), top = max(before, now);
  auto share = [&](F16 part) { return two_to_any(max(all16(-126), mul(sub(part, top), all16(kLog2e)))); };
  alignas(64) float old_shares[kAmxRows], new_shares[kAmxRows];
  const F16 kept = _mm512_mask_mov_ps(share(before), _mm512_cmp_ps_mask(load16(next_weight), zero16(), _CMP_EQ_OQ), one);
  const F16 added = share(now);
  store(old_shares, kept);
  store(new_shares, added);
  store(weight, fma(load16(next_weight), added, mul(load16(weight), kept)));
  store(most, top);
  for (int m = 0; m < rows; ++m) {
    const F16 old_share = all16(old_shares[m]), new_share = all16(new_shares[m]);
    for (int d = 0; d < dim; d += 16) {
      store(values + m * dim + d, fma(load16(next + m * dim + d), new_share, mul(load16(values + m * dim + d), old_share)));
    }
  }
}

// One tile's queries against one KV head.
inline void attend_prompt(
    const float* qkv, const Heads& h, const Tiles& t, int tile, int kv, Cache<uint16_t> cache, float* out) {
  static thread_local WideSplit split;
  static thread_local std::vector<float> values;
  cache.keys += kv * cache.head_stride;
  const int dim = h.head_dim, shared = h.heads / h.kv_heads, rows = t.counts[tile] * shared;
  const int64_t stride = int64_t{h.heads + 2 * h.kv_heads} * dim, first = t.firsts[tile];
  values.assign(kQueries * dim, 0.0f);
  alignas(64) BrainTile queries[kQueryTiles * kDimTiles];
  alignas(64) float most[kQueries], weight[kQueries] = {};
  int64_t begins[kQueries], ends[kQueries];
  std::fill_n(most, kQueries, kNothing);
  for (int r = 0; r < rows; ++r) {
    const int64_t token = first + r / shared, position = t.positions[token];
    const float* query = qkv + token * stride + (kv * shared + r % shared) * dim;
    for (int d = 0; d < dim; d += kGroup) {
      const __m512i pair = (__m512i)_mm512_cvtne2ps_pbh(load16(query + d + 16), load16(query + d));
      _mm512_store_si512(queries[r / kAmxRows * (dim / kGroup) + d / kGroup].values[r % kAmxRows], pair);
    }
    begins[r] = h.window ? std::max<int64_t>(0, position + 1 - h.window) : 0;
    ends[r] = position + 1;
  }
  const int64_t end = ends[rows - 1];
  for (int64_t s = begins[0] / kSplitKeys; s * kSplitKeys < end; ++s) {
    const int64_t base = s * kSplitKeys;
    widen(split_of(cache, t.tables + t.starts[tile], s, end), end - base, dim, split);
    for (int from = 0; from < rows; from += kAmxRows) {
      alignas(64) float scores[kAmxRows * kSplitKeys], mixed[kAmxRows * kMaxHeadDim];
      alignas(64) BrainTile weights[kSplitBlocks / 2];
      alignas(64) float next_most[kAmxRows], next_weight[kAmxRows] = {};
      int seen_from[kAmxRows], seen_to[kAmxRows];
      const int count = std::min(kAmxRows, rows - from);
      for (int m = 0; m < count; ++m) {
        seen_to[m] = static_cast<int>(std::clamp<int64_t>(ends[from + m] - base, 0, kSplitKeys));
        seen_from[m] = static_cast<int>(std::clamp<int64_t>(begins[from + m] - base, 0, seen_to[m]));
      }
      const int blocks = (seen_to[count - 1] + kBlock - 1) / kBlock, pairs = (blocks + 1) / 2;
      if (blocks == 0) continue;
      auto keys = [&](int d, int b) { return split.keys + b * (dim / kGroup) + d; };
      all_tiles_of_row(queries + from / kAmxRows * (dim / kGroup), dim / kGroup, blocks, keys, scores, kSplitKeys);
      std::fill_n(next_most, kAmxRows, kNothing);
      weigh_rows(scores, pairs, seen_from, seen_to, count, weights, next_most, next_weight);
      auto values_of = [&](int p, int column) { return split.values + p * (dim / 16) + column; };
      all_tiles_of_row(weights, pairs, dim / 16, values_of, mixed, dim);
      fold_rows(most + from, weight + from, &values[from * dim], next_most, next_weight, mixed, count, dim);
    }
  }
  for (int r = 0; r < rows; ++r) {
    finish(&values[r * dim], weight[r], dim, out + ((first + r / shared) * h.heads + kv * shared + r % shared) * dim);
  }
}

inline void attend_prompts(const float* qkv, const Heads& h, const Tiles& t, const Cache<uint16_t>& cache, float* out) {
  const int64_t items = int64_t{t.prompts} * h.kv_heads, a_chunk = (items + kMaxChunks - 1) / kMaxChunks;
  parallel(static_cast<int>((items + a_chunk - 1) / a_chunk), [&](int chunk) {
    const AmxTiles tiles{{64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    for (int64_t number = chunk * a_chunk; number < std::min(items, (chunk + 1) * a_chunk); ++number) {
      // The last tiles see most, so that they come first.
      const int tile = t.count - 1 - static_cast<int>(number / h.kv_heads), kv = static_cast<int>(number % h.kv_heads);
      attend_prompt(qkv, h, t, tile, kv, cache, out);
    }
  });
}

}  // namespace headrace::VARIANT
