// Attention of a prompt's rows for AMX: scores and mixed values are sums of tiles, in bfloat16 as the products of prompts.h.
//
// A tile of Tiles is here as many queries as share what it costs to make keys and values bfloat16. As in attention.h splits
// of keys have a fixed size and are added from the oldest to the newest, and keys that a row may not see weigh nothing, so
// that the tile does not change a row's result.
#pragma once

#include "attention.h"
#include "prompts.h"

namespace headrace::VARIANT {

constexpr int kQueryTiles = 12;  // of sixteen rows, a query's head each
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

// out (16 rows, `stride` floats apart): products of a tile of rows and a row of tiles, two of these at a step. What is behind
// an odd last one is computed too.
class TileRow {
 public:
  TileRow() = default;
  // a [depth]; w [depth, tiles], `down` and `across` apart.
  TileRow(const BrainTile* a, int depth, const BrainTile* w, int64_t down, int64_t across, int tiles, float* out, int64_t stride)
      : a_(a), w_(w), depth_(depth), left_(tiles), down_(down), across_(across), stride_(stride), out_(out) {}

  bool step() {
    if (left_ <= 0) return false;
    asm volatile("" ::: "memory");  // gcc's intrinsics do not say that a tile is loaded from memory, nor that one is stored
    _tile_zero(0);
    _tile_zero(1);
    const BrainTile* w = w_;
    for (int d = 0; d < depth_; ++d, w += down_) {
      _tile_loadd(4, a_ + d, 64);
      _tile_loadd(5, w, 64);
      _tile_loadd(6, w + across_, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_dpbf16ps(1, 4, 6);
    }
    _tile_stored(0, out_, sizeof(float) * stride_);
    _tile_stored(1, out_ + 16, sizeof(float) * stride_);
    asm volatile("" ::: "memory");
    left_ -= 2;
    w_ += 2 * across_;
    out_ += 2 * 16;
    return true;
  }

 private:
  const BrainTile *a_, *w_;
  int depth_, left_ = 0;
  int64_t down_, across_, stride_;
  float* out_;
};

constexpr float kNothing = -3e38f;  // the largest of no scores

// 2^x for x from -126 on, relative error below 8e-5, for weights that are rounded to bfloat16; exact for whole numbers but
// for the same error in all of them.
inline F16 weight_of(F16 x) {
  const F16 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // what is above the whole number below
  F16 y = fma(all16(0.07802428f), f, all16(0.22606727f));
  y = fma(y, f, all16(0.69583363f));
  y = fma(y, f, all16(0.99992519f));
  return _mm512_scalef_ps(y, x);
}

// Scores of a row, of which [begin, end) are seen, to weights 2^(score - largest) in row m of `weights`; 2 kPairs blocks.
template <int kPairs, bool all_seen>
inline void weigh_row(const float* scores, int begin, int end, int m, BrainTile* weights, float& most, float& weight) {
  F16 e[2 * kPairs];
  __mmask16 seen[2 * kPairs];
  const __m512i count = _mm512_set1_epi32(end - begin);
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  __m512i place = _mm512_sub_epi32(lanes, _mm512_set1_epi32(begin));
  F16 top = all16(kNothing);
  UNROLL for (int b = 0; b < 2 * kPairs; ++b) {
    e[b] = load16(scores + b * kBlock);
    if constexpr (all_seen) {
      top = max(top, e[b]);
      continue;
    }
    seen[b] = _mm512_cmplt_epu32_mask(place, count);
    place = _mm512_add_epi32(place, _mm512_set1_epi32(kBlock));
    top = _mm512_mask_max_ps(top, seen[b], top, e[b]);
  }
  most = _mm512_reduce_max_ps(top);
  const F16 least = all16(-126), base = all16(-most * kLog2e);
  F16 total = zero16();
  UNROLL for (int b = 0; b < 2 * kPairs; ++b) {
    e[b] = weight_of(max(least, fma(e[b], all16(kLog2e), base)));
    if constexpr (!all_seen) e[b] = _mm512_maskz_mov_ps(seen[b], e[b]);
    total = add(total, e[b]);
  }
  UNROLL for (int p = 0; p < kPairs; ++p) {
    _mm512_store_si512(weights[p].values[m], (__m512i)_mm512_cvtne2ps_pbh(e[2 * p + 1], e[2 * p]));
  }
  weight = _mm512_reduce_add_ps(total);
}

// What is known of a tile of rows and one split. `scores` to `mixed` are made by turns.
struct RowTile {
  int count;  // rows
  int pairs;  // of blocks of which some is seen
  bool all_seen;
  int begins[kAmxRows], ends[kAmxRows];
  alignas(64) float scores[kAmxRows * kSplitKeys];
  alignas(64) BrainTile weights[kSplitBlocks / 2];
  alignas(64) float most[kAmxRows], weight[kAmxRows];
  alignas(64) float mixed[kAmxRows * kMaxHeadDim];
};

// Scores to weights; between the rows step() does some of what the tiles have to do for others.
template <int kPairs = kSplitBlocks / 2, class Step>
inline void weigh_rows(RowTile& tile, const Step& step) {
  if constexpr (kPairs > 1) {
    if (tile.pairs < kPairs) return weigh_rows<kPairs - 1>(tile, step);
  }
  std::fill_n(tile.most, kAmxRows, kNothing);
  std::fill_n(tile.weight, kAmxRows, 0.0f);
  for (int m = 0; m < tile.count; ++m) {
    const float* scores = tile.scores + m * kSplitKeys;
    if (tile.all_seen) {
      weigh_row<kPairs, true>(scores, tile.begins[m], tile.ends[m], m, tile.weights, tile.most[m], tile.weight[m]);
    } else {
      weigh_row<kPairs, false>(scores, tile.begins[m], tile.ends[m], m, tile.weights, tile.most[m], tile.weight[m]);
    }
    if (m % 2 == 1) step();
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

// One tile's queries against one KV head. Vectors weigh one tile of rows while the tiles score the next and mix the last.
inline void attend_prompt(
    const float* qkv, const Heads& h, const Tiles& t, int tile, int kv, Cache<uint16_t> cache, float* out) {
  static thread_local WideSplit split_of_thread;
  static thread_local std::vector<float> values_of_thread;
  static thread_local RowTile tiles_of_thread[3];
  WideSplit& split = split_of_thread;
  RowTile* const row_tiles = tiles_of_thread;
  cache.keys += kv * cache.head_stride;
  const int dim = h.head_dim, shared = h.heads / h.kv_heads, rows = t.counts[tile] * shared;
  const int64_t stride = int64_t{h.heads + 2 * h.kv_heads} * dim, first = t.firsts[tile];
  values_of_thread.assign(rows * dim, 0.0f);
  float* const values = values_of_thread.data();
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
    int from = 0;  // later rows see more: those from here on see some of the split
    while (from < rows && ends[std::min(rows, from + kAmxRows) - 1] <= base) from += kAmxRows;
    const auto scoring = [&](int row) {
      RowTile& made = row_tiles[row / kAmxRows % 3];
      made.count = std::min(kAmxRows, rows - row);
      made.all_seen = true;
      for (int m = 0; m < made.count; ++m) {
        made.ends[m] = static_cast<int>(std::clamp<int64_t>(ends[row + m] - base, 0, kSplitKeys));
        made.begins[m] = static_cast<int>(std::clamp<int64_t>(begins[row + m] - base, 0, made.ends[m]));
        made.all_seen &= made.begins[m] == 0 && made.ends[m] == kSplitKeys;
      }
      const int blocks = (made.ends[made.count - 1] + kBlock - 1) / kBlock;
      made.pairs = (blocks + 1) / 2;
      const int depth = dim / kGroup;
      return TileRow(queries + row / kAmxRows * depth, depth, split.keys, 1, depth, blocks, made.scores, kSplitKeys);
    };
    const auto mixing = [&](int row) {
      RowTile& weighed = row_tiles[row / kAmxRows % 3];
      return TileRow(weighed.weights, weighed.pairs, split.values, dim / 16, 1, dim / 16, weighed.mixed, dim);
    };
    const auto fold_tile = [&](int row) {
      const RowTile& mixed = row_tiles[row / kAmxRows % 3];
      fold_rows(most + row, weight + row, values + row * dim, mixed.most, mixed.weight, mixed.mixed, mixed.count, dim);
    };
    TileRow scored = scoring(from);
    while (scored.step()) {
    }
    for (int row = from; row < rows; row += kAmxRows) {
      const int next = row + kAmxRows, last = row - kAmxRows;
      TileRow ahead = next < rows ? scoring(next) : TileRow(), behind = last >= from ? mixing(last) : TileRow();
      weigh_rows(row_tiles[row / kAmxRows % 3], [&] { ahead.step() || behind.step(); });
      while (ahead.step() || behind.step()) {
      }
      if (last >= from) fold_tile(last);
    }
    const int last = (rows - 1) / kAmxRows * kAmxRows;
    TileRow mixed = mixing(last);
    while (mixed.step()) {
    }
    fold_tile(last);
  }
  for (int r = 0; r < rows; ++r) {
    finish(values + r * dim, weight[r], dim, out + ((first + r / shared) * h.heads + kv * shared + r % shared) * dim);
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
