// Runs every kernel over random shapes in memory of exactly their size, for the sanitizers to watch. It checks what needs
// no second implementation: the number of threads, and the rows that share a call, change no bit of a result.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "types.h"

using namespace headrace;

extern "C" {
const char* headrace_use(const char* wanted);
void headrace_threads(int count);
int headrace_prompt_tile_rows();
void headrace_linear(
    const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* parts, int count, const float* residual,
    float* out);
void headrace_mlp(
    const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* gate_up, const Matrix* down,
    const float* residual, float* out);
void headrace_attention(float* qkv, const Heads* heads, const Tiles* tiles, void* cache, float* out);
void headrace_scan(const float* logits, int64_t rows, int64_t stride, int64_t columns, int64_t* best, float* log_sums);
void headrace_mask(
    float* logits, const int64_t* places, int64_t count, int64_t stride, int64_t columns, const uint32_t* bits, int64_t words);
void headrace_draw(
    const float* logits, int64_t rows, int64_t stride, int64_t columns, const float* temperatures, const double* numbers,
    int64_t* tokens);
void headrace_threshold(
    const float* scores, const float* weights, int64_t rows, int64_t columns, const double* masses, float* thresholds);
struct SharedGroup;
uint32_t headrace_run(const Call* calls, int64_t count, int64_t rows, int64_t prompts, SharedGroup* group);
}

namespace {

std::mt19937 generator(1);

int pick(int low, int high) { return std::uniform_int_distribution<int>(low, high)(generator); }

std::vector<float> numbers(int64_t count, float deviation = 1.0f) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> out(count);
  for (float& x : out) x = normal(generator);
  return out;
}

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// A matrix of random values in one of the formats.
struct Weights {
  Weights(int32_t format, int rows, int64_t columns, bool with_bias) {
    matrix.format = format;
    matrix.rows = rows;
    matrix.columns = columns;
    for (int64_t& edge : matrix.breaks) edge = pick(0, columns / kGroup) * kGroup;
    std::sort(matrix.breaks, matrix.breaks + 3);
    matrix.apart = 0;
    panels.resize(matrix.panel_count() * matrix.panel_bytes());
    if (format == kFloat32) {
      const std::vector<float> values = numbers(panels.size() / 4);
      std::memcpy(panels.data(), values.data(), panels.size());
    } else if (format == kBFloat16 || format == kFloat16) {
      for (size_t at = 0; at < panels.size(); at += 2) {
        panels[at] = static_cast<uint8_t>(pick(0, 255));
        panels[at + 1] = static_cast<uint8_t>(pick(0, 0x3b));  // below 1
      }
    } else {
      const int64_t group = format == kInt8 ? kInt8Bytes : kInt4Bytes;
      const int64_t scales = format == kInt8 ? 2 * kPanel : 4 * kPanel;
      for (int64_t at = 0; at < static_cast<int64_t>(panels.size()); at += group) {
        for (int64_t i = 0; i < group - scales; ++i) panels[at + i] = static_cast<uint8_t>(pick(0, 255));
        for (int64_t i = group - scales; i < group; i += 2) panels[at + i + 1] = 0x20;  // about 0.01
      }
    }
    if (with_bias) bias = numbers(rows);
    matrix.panels = panels.data();
    matrix.bias = with_bias ? bias.data() : nullptr;
  }

  Matrix matrix;
  std::vector<uint8_t> panels;
  std::vector<float> bias;
};

void products() {
  const int32_t format = pick(0, kFormats - 1);
  const int64_t columns = pick(1, 6) * kGroup;
  const int rows = pick(1, 310), prompts = pick(0, rows), inner = pick(1, 3) * kGroup, count = pick(1, 3);
  std::vector<Weights> parts;
  for (int i = 0; i < count; ++i) parts.emplace_back(format, pick(1, 60), columns, pick(0, 1));
  std::vector<Matrix> matrices;
  int64_t width = 0;
  for (const Weights& part : parts) {
    matrices.push_back(part.matrix);
    matrices.back().panels = part.panels.data();
    matrices.back().bias = part.bias.empty() ? nullptr : part.bias.data();
    width += part.matrix.rows;
  }
  const Weights gate(format, inner, columns, false), up(format, inner, columns, false), down(format, columns, inner, true);
  const Matrix gate_up[] = {gate.matrix, up.matrix};
  const std::vector<float> x = numbers(rows * columns), weight = numbers(columns);
  const Norm norm{weight.data(), 1e-5f};
  const std::vector<float> residual = numbers(rows * width);
  std::vector<float> out(rows * width), fed(rows * columns);
  headrace_threads(1);
  headrace_linear(x.data(), rows, prompts, &norm, matrices.data(), count, residual.data(), out.data());
  headrace_mlp(x.data(), rows, prompts, &norm, gate_up, &down.matrix, x.data(), fed.data());
  headrace_threads(pick(2, 4));
  const int begin = pick(0, rows - 1), some = pick(1, rows - begin);
  std::vector<float> part(some * width), part_fed(some * columns);
  const std::vector<float> part_x(x.begin() + begin * columns, x.begin() + (begin + some) * columns);
  const std::vector<float> part_residual(residual.begin() + begin * width, residual.begin() + (begin + some) * width);
  const auto address = [](const void* p) { return reinterpret_cast<int64_t>(p); };
  const Call calls[] = {
      {kLinear,
       {address(part_x.data()), address(&norm), address(matrices.data()), count, address(part_residual.data()),
        address(part.data())}},
      {kMlp,
       {address(part_x.data()), address(&norm), address(gate_up), address(&down.matrix), address(part_x.data()),
        address(part_fed.data())}},
  };
  headrace_run(calls, 2, some, std::clamp(begin + some - (rows - prompts), 0, some), nullptr);
  check(std::memcmp(part.data(), &out[begin * width], part.size() * 4) == 0, "a product's rows are independent");
  check(std::memcmp(part_fed.data(), &fed[begin * columns], part_fed.size() * 4) == 0, "feed-forward rows are independent");
}

// Queries in tiles of `tallest`, of one sequence: positions begin .. end - 1, of a prompt or not.
void attend(
    const Heads& heads, std::vector<float> qkv, int begin, int end, int tallest, bool prompt, const std::vector<int32_t>& table,
    std::vector<uint8_t>& cache, float* out) {
  const int half = heads.head_dim / 2;
  std::vector<int32_t> firsts, counts;
  std::vector<int64_t> starts, positions, slots;
  for (int at = 0; at < end - begin; at += tallest) {
    firsts.push_back(at);
    counts.push_back(std::min(tallest, end - begin - at));
    starts.push_back(0);
  }
  for (int at = begin; at < end; ++at) {
    positions.push_back(at);
    slots.push_back(int64_t{table[at / kBlock]} * kBlock + at % kBlock);
  }
  std::vector<float> cosines(end * half, 0.6f), sines(end * half, 0.8f);
  const int32_t count = static_cast<int32_t>(firsts.size());
  const Tiles tiles{
      count, prompt ? count : 0, end - begin, firsts.data(), counts.data(), starts.data(), table.data(), positions.data(),
      slots.data(), cosines.data(), sines.data()};
  headrace_attention(qkv.data(), &heads, &tiles, cache.data(), out);
}

void attention() {
  Heads heads;
  heads.kv_heads = pick(1, 3);
  heads.heads = heads.kv_heads * pick(1, 7);
  heads.head_dim = 16 * pick(1, 5);
  heads.window = pick(0, 2) ? 0 : pick(1, 200);
  heads.half = pick(0, 1);
  heads.block_stride = int64_t{2} * kBlock * heads.head_dim * heads.kv_heads;
  const int length = pick(1, 300), blocks = (length + kBlock - 1) / kBlock;
  std::vector<int32_t> table(blocks);
  for (int i = 0; i < blocks; ++i) table[i] = blocks - i;
  const int64_t width = int64_t{heads.heads + 2 * heads.kv_heads} * heads.head_dim;
  const int64_t out_width = int64_t{heads.heads} * heads.head_dim;
  const size_t bytes = size_t{2} * kBlock * heads.head_dim * heads.kv_heads * (blocks + 1) * (heads.half ? 2 : 4);
  const std::vector<float> qkv = numbers(length * width);
  std::vector<float> whole(length * out_width), pieces(length * out_width);
  std::vector<uint8_t> cache(bytes), other(bytes);
  const bool prompt = headrace_prompt_tile_rows() && heads.half && heads.head_dim % kGroup == 0 && pick(0, 1);
  const int tallest = std::max(1, (prompt ? headrace_prompt_tile_rows() : 6) / (heads.heads / heads.kv_heads));
  headrace_threads(1);
  attend(heads, qkv, 0, length, tallest, prompt, table, cache, whole.data());
  headrace_threads(pick(2, 4));
  for (int at = 0; at < length;) {
    const int next = std::min(length, at + pick(1, 150));
    const std::vector<float> some(qkv.begin() + at * width, qkv.begin() + next * width);
    attend(heads, some, at, next, pick(1, tallest), prompt, table, other, &pieces[at * out_width]);
    at = next;
  }
  check(same(whole, pieces), "attention does not depend on chunks");
}

void passes() {
  const int64_t rows = pick(1, 6), columns = pick(1, 20000), stride = columns + pick(0, 9);
  const std::vector<float> logits = numbers((rows - 1) * stride + columns, 3.0f);
  const std::vector<float> temperatures(rows, 0.8f);
  const std::vector<double> uniform(rows, 0.3);
  std::vector<int64_t> best(rows), drawn(rows), best_of_many(rows), drawn_of_many(rows);
  std::vector<float> sums(rows), sums_of_many(rows);
  headrace_threads(1);
  headrace_scan(logits.data(), rows, stride, columns, best.data(), sums.data());
  headrace_draw(logits.data(), rows, stride, columns, temperatures.data(), uniform.data(), drawn.data());
  headrace_threads(3);
  headrace_scan(logits.data(), rows, stride, columns, best_of_many.data(), sums_of_many.data());
  headrace_draw(logits.data(), rows, stride, columns, temperatures.data(), uniform.data(), drawn_of_many.data());
  std::vector<float> weights(rows * columns, 1.0f / columns), scores = numbers(rows * columns), thresholds(rows);
  headrace_threshold(scores.data(), weights.data(), rows, columns, uniform.data(), thresholds.data());
  for (int64_t row = 0; row < rows; ++row) {
    int64_t above = 0;
    for (int64_t i = 0; i < columns; ++i) above += scores[row * columns + i] > thresholds[row];
    check(above <= 0.3 * columns + 1, "a threshold leaves the mass above it");
  }
  std::vector<int64_t> places(rows);
  for (int64_t row = 0; row < rows; ++row) places[row] = row;
  const int64_t words = columns / 32;
  const std::vector<uint32_t> bits(rows * words, 0xff00ff01u);
  std::vector<float> masked = logits;
  headrace_mask(masked.data(), places.data(), rows, stride, columns, bits.data(), words);
  for (int64_t i = 0; i < columns; ++i) {
    check(masked[i] == (i / 32 < words && 0xff00ff01u >> i % 32 & 1 ? logits[i] : -INFINITY), "a mask keeps what has a bit");
  }
  check(same(best, best_of_many) && same(sums, sums_of_many) && same(drawn, drawn_of_many), "passes do not depend on threads");
}

// Several threads that call at once, while the pool's own threads fall asleep in between.
void callers() {
  headrace_threads(3);
  std::vector<std::thread> threads;
  for (int caller = 0; caller < 3; ++caller) {
    threads.emplace_back([] {
      const std::vector<float> logits(30000, 1.0f);
      for (int i = 0; i < 40; ++i) {
        int64_t best;
        float sum;
        headrace_scan(logits.data(), 1, 30000, 30000, &best, &sum);
        check(best == 0, "the first of equal logits is the best");
        if (i % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[1]);
  for (const char* variant : {"amx", "avx512", "avx2", "portable"}) {
    std::printf("%s as %s\n", variant, headrace_use(variant));
    for (int i = 0; i < rounds; ++i) {
      products();
      attention();
      passes();
    }
    callers();
  }
  headrace_threads(1);
  return 0;
}
