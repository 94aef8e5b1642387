// The functions that Python calls, and the choice of the instruction set.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>

#ifdef HEADRACE_HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "blocks.h"
#include "pool.h"
#include "shared.h"
#include "types.h"

namespace headrace {

namespace portable {
extern const Kernels kernels;
}
#ifdef HEADRACE_HAS_AVX2
namespace avx2 {
extern const Kernels kernels;
}
#endif
#ifdef HEADRACE_HAS_AVX512
namespace avx512 {
extern const Kernels kernels;
}
#endif
#ifdef HEADRACE_HAS_AMX
namespace amx {
extern const Kernels kernels;
}
#endif

namespace {

bool always() { return true; }

#ifdef HEADRACE_HAS_AVX2
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
#endif

#ifdef HEADRACE_HAS_AVX512
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}
#endif

#ifdef HEADRACE_HAS_AMX
// Linux keeps a process's tiles only if the process has asked for that.
bool has_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned kBrains = 1u << 22, kTiles = 1u << 24, kBytes = 1u << 25, kBrainVectors = 1u << 5;
  constexpr unsigned kTileForms = kBrains | kTiles | kBytes;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTileForms) != kTileForms) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & kBrainVectors &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

// From the best to the one that runs everywhere.
struct Variant {
  const char* name;
  const Kernels* kernels;
  bool (*runs)();
};
const Variant variants[] = {
#ifdef HEADRACE_HAS_AMX
    {"amx", &amx::kernels, has_amx},
#endif
#ifdef HEADRACE_HAS_AVX512
    {"avx512", &avx512::kernels, has_avx512},
#endif
#ifdef HEADRACE_HAS_AVX2
    {"avx2", &avx2::kernels, has_avx2},
#endif
    {"portable", &portable::kernels, always},
};

const Kernels* chosen = &portable::kernels;

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

// Returns 0, or why a sum did not come about.
uint32_t make(const Call& call, int64_t rows, int64_t prompts, SharedGroup* group) {
  const int64_t* a = call.arguments;
  auto out = [&](int64_t address) { return address ? pointer<float>(address) : room_of(group); };
  switch (call.function) {
    case kLinear:
      chosen->linear(
          pointer<float>(a[0]), rows, prompts, pointer<Norm>(a[1]), pointer<Matrix>(a[2]), static_cast<int>(a[3]),
          pointer<float>(a[4]), out(a[5]));
      return 0;
    case kMlp:
      chosen->mlp(
          pointer<float>(a[0]), rows, prompts, pointer<Norm>(a[1]), pointer<Matrix>(a[2]), pointer<Matrix>(a[3]),
          pointer<float>(a[4]), out(a[5]));
      return 0;
    case kSum:
      return sum(group, pointer<uint8_t>(a[0]), pointer<float>(a[1]), pointer<float>(a[2]), rows * a[3]);
    default:
      chosen->attention(
          pointer<float>(a[0]), pointer<Heads>(a[1]), pointer<Tiles>(a[2]), pointer<void>(a[3]), pointer<float>(a[4]));
      return 0;
  }
}

}  // namespace
}  // namespace headrace

using namespace headrace;

#pragma GCC visibility push(default)
extern "C" {

// Chooses the instruction set of this name, or the best one for "". Returns the name of what is used, which is the best of
// the lesser ones if this CPU does not have it.
const char* headrace_use(const char* wanted) {
  const char* const names[] = {"amx", "avx512", "avx2", "portable"};
  auto is_wanted = [&](const char* name) { return *wanted == 0 || std::strcmp(name, wanted) == 0; };
  const auto* first = std::find_if(std::begin(names), std::end(names), is_wanted);
  for (; first != std::end(names); ++first) {
    for (const Variant& variant : variants) {
      if (std::strcmp(variant.name, *first) != 0 || !variant.runs()) continue;
      chosen = variant.kernels;
      return variant.name;
    }
  }
  return "";
}

// Pairs of a query and a head that one tile of attention takes at best.
int headrace_tile_rows() { return chosen->tile_rows; }

// The same in tiles of prompts; 0 where these are computed as all others are.
int headrace_prompt_tile_rows() { return chosen->prompt_tile_rows; }

void headrace_threads(int count) { set_threads(count); }

// Packs rows of a GGUF tensor, `order[i]` being the row that comes as i-th (-1: a row of zeros), and of each row
// `groups` groups of 32 columns from `first_group`. `out` is zero.
void headrace_pack_blocks(
    int kind, const uint8_t* raw, int64_t row_bytes, const int32_t* order, int64_t rows, int64_t first_group, int64_t groups,
    uint8_t* out) {
  pack_blocks(kind, raw, row_bytes, order, rows, first_group, groups, out);
}

// Packs values in a format, rounding them where it asks for that. `out` is zero.
void headrace_pack(const Values* values, int32_t format, uint8_t* out) { chosen->pack(values, format, out); }

// Takes spans of memory out of the caches, where the CPU lets a program do that.
void headrace_evict(const uint8_t* const* addresses, const int64_t* bytes, int count) {
#if defined(__x86_64__)
  parallel(count, [&](int i) {
    for (int64_t k = 0; k < bytes[i]; k += 64) __builtin_ia32_clflush(addresses[i] + k);
    __builtin_ia32_mfence();
  });
#endif
}

// Reads spans of memory with all threads; returns something that depends on every byte.
uint64_t headrace_read(const uint64_t* const* addresses, const int64_t* bytes, int count) {
  std::atomic<uint64_t> all{0};
  parallel(count, [&](int i) {
    const uint64_t* p = addresses[i];
    uint64_t sums[8] = {};
    for (int64_t k = 0; k + 8 <= bytes[i] / 8; k += 8) {
      for (int j = 0; j < 8; ++j) sums[j] ^= p[k + j];
    }
    for (uint64_t sum : sums) all.fetch_xor(sum, std::memory_order_relaxed);
  });
  return all.load();
}


void headrace_linear(
    const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* parts, int count, const float* residual,
    float* out) {
  chosen->linear(x, rows, prompts, norm, parts, count, residual, out);
}

void headrace_mlp(
    const float* x, int64_t rows, int64_t prompts, const Norm* norm, const Matrix* gate_up, const Matrix* down,
    const float* residual, float* out) {
  chosen->mlp(x, rows, prompts, norm, gate_up, down, residual, out);
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

void headrace_mask(
    float* logits, const int64_t* places, int64_t count, int64_t stride, int64_t columns, const uint32_t* bits, int64_t words) {
  chosen->mask(logits, places, count, stride, columns, bits, words);
}

void headrace_threshold(
    const float* scores, const float* weights, int64_t rows, int64_t columns, const double* masses, float* thresholds) {
  chosen->threshold(scores, weights, rows, columns, masses, thresholds);
}

// Makes recorded calls, one after the other; the sums are those of `group`. Returns 0, or why a sum did not come about.
uint32_t headrace_run(const Call* calls, int64_t count, int64_t rows, int64_t prompts, SharedGroup* group) {
  if (uint32_t reason = group ? wait(group) : 0) return reason;
  for (const Call* call = calls; call < calls + count; ++call) {
    if (uint32_t reason = make(*call, rows, prompts, group)) return reason;
  }
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
