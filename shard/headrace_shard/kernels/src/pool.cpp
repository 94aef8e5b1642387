#include "pool.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {
namespace {

// Between two operations of a step Python runs for some microseconds: a worker spins through those, yields its core to
// whoever wants it a while longer, and sleeps when the step is over.
constexpr int kSpins = 4000;
constexpr int kYields = 60;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

// A thread's chunks of a job that nobody has taken: `next` to `end`, and the job's generation, in one word, so that a chunk
// is claimed together with the knowledge of which job it belongs to. The job's fields may be read from then until that
// chunk is counted as done.
struct Range {
  static uint64_t make(uint32_t generation, uint32_t next, uint32_t end) {
    return uint64_t{generation} << 32 | uint64_t{next} << 16 | end;
  }
  static uint32_t next(uint64_t word) { return word >> 16 & 0xffff; }
  static uint32_t end(uint64_t word) { return word & 0xffff; }
  static bool empty(uint64_t word) { return next(word) == end(word); }
};

class Pool {
 public:
  int size() const { return static_cast<int>(workers_.size()) + 1; }

  void resize(int count) {
    std::lock_guard<std::mutex> turn(turn_);
    if (count == size()) return;
    stop_.store(true);
    wake();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false);
    ranges_ = std::vector<Line>(count);
    for (int i = 1; i < count; ++i) workers_.emplace_back([this, i] { work(i); });
  }

  void run(int chunks, Task task, void* argument) {
    std::lock_guard<std::mutex> turn(turn_);
    if (chunks == 1 || workers_.empty()) {
      for (int i = 0; i < chunks; ++i) task(argument, i);
      return;
    }
    task_ = task;
    argument_ = argument;
    done_.store(0, std::memory_order_relaxed);
    ++generation_;
    const int threads = size();
    auto edge = [&](int i) { return static_cast<uint32_t>(int64_t{chunks} * i / threads); };
    for (int i = 0; i < threads; ++i) ranges_[i].word.store(Range::make(generation_, edge(i), edge(i + 1)));
    if (sleepers_.load()) wake();
    while (take(0)) {
    }
    wait_done(chunks);
  }

 private:
  struct alignas(64) Line {  // written by the thread it is about, and by those that have nothing left
    std::atomic<uint64_t> word{0};
  };

  // Its own chunks come in their order, which is that of memory; those of others are taken from the end.
  bool take(int me) {
    const size_t threads = ranges_.size();
    for (size_t i = 0; i < threads; ++i) {
      std::atomic<uint64_t>& range = ranges_[(me + i) % threads].word;
      uint64_t seen = range.load(std::memory_order_acquire);
      while (!Range::empty(seen)) {
        if (!range.compare_exchange_weak(seen, i == 0 ? seen + (1 << 16) : seen - 1)) continue;
        task_(argument_, static_cast<int>(i == 0 ? Range::next(seen) : Range::end(seen) - 1));
        done_.fetch_add(1);
        if (waiting_.load()) futex(&done_, FUTEX_WAKE, 1);
        return true;
      }
    }
    return false;
  }

  void wait_done(uint32_t chunks) {
    for (int i = 0; i < kSpins; ++i) {
      if (done_.load(std::memory_order_acquire) == chunks) return;
      pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (done_.load(std::memory_order_acquire) == chunks) return;
      sched_yield();
    }
    waiting_.store(1);
    for (uint32_t seen = done_.load(); seen != chunks; seen = done_.load()) futex(&done_, FUTEX_WAIT, seen);
    waiting_.store(0);
  }

  void work(int me) {
    for (int idle = 0; !stop_.load(std::memory_order_relaxed);) {
      if (take(me)) {
        idle = 0;
      } else if (++idle < kSpins) {
        pause();
      } else if (idle < kSpins + kYields) {
        sched_yield();
      } else {
        idle = 0;
        sleep();
      }
    }
  }

  void sleep() {
    uint32_t seen = wakes_.load();
    sleepers_.fetch_add(1);
    const bool idle = std::all_of(ranges_.begin(), ranges_.end(), [](const Line& line) { return Range::empty(line.word.load()); });
    if (idle && !stop_.load()) futex(&wakes_, FUTEX_WAIT, seen);
    sleepers_.fetch_sub(1);
  }

  void wake() {
    wakes_.fetch_add(1);
    futex(&wakes_, FUTEX_WAKE, INT_MAX);
  }

  std::mutex turn_;
  std::vector<std::thread> workers_;
  std::vector<Line> ranges_{1};
  Task task_ = nullptr;
  void* argument_ = nullptr;
  uint32_t generation_ = 0;
  std::atomic<bool> stop_{false};
  // Each on a cache line of its own: they are written at different times by different threads.
  alignas(64) std::atomic<uint32_t> done_{0};
  alignas(64) std::atomic<uint32_t> waiting_{0};
  alignas(64) std::atomic<uint32_t> sleepers_{0};
  alignas(64) std::atomic<uint32_t> wakes_{0};
};

// Never destroyed: its threads may run while the process ends.
Pool& pool() {
  static Pool* one = new Pool;
  return *one;
}

}  // namespace

void set_threads(int count) { pool().resize(count); }
int threads() { return pool().size(); }
void run(int chunks, Task task, void* argument) { pool().run(chunks, task, argument); }

}  // namespace headrace
