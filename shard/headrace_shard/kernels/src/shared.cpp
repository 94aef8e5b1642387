// A shard group on one host: meetings of its ranks, and sums, over memory that all of them have mapped.
//
// Behind the control words the memory holds two sets of slots, one slot a rank. Meeting number n uses set n mod 2: a rank
// writes its slot, meets the others, and reads theirs. Whoever comes to meeting n + 1 has read what it wanted of meeting n,
// so that the set is free for meeting n + 2.
#include "shared.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pool.h"

namespace headrace {
namespace {

constexpr int kSpins = 4000;
constexpr int kYields = 60;
constexpr double kSlice = 0.1;       // seconds of sleep between two looks at whether the others live
constexpr int64_t kRun = 16;         // numbers that are summed at a time
constexpr int64_t kAhead = 512;      // numbers from what is summed to what is fetched from the other cores' caches
constexpr int64_t kPiece = 1 << 15;  // numbers of a sum that are worth another thread

// Why no meeting will come about any more, as `reason << 16 | rank`; 0 while there is no reason.
enum Reason : uint32_t { kEnded = 1, kSilent = 2 };

struct Run {
  float numbers[kRun];

  void operator+=(const Run& other) {
    for (int64_t i = 0; i < kRun; ++i) numbers[i] += other.numbers[i];
  }
};

template <class T>
T load(const float* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// One T of a half's sum.
template <class T>
T half_at(const std::vector<const float*>& parts, int64_t at) {
  T total = load<T>(parts[0] + at);
  for (size_t i = 1; i < parts.size(); ++i) total += load<T>(parts[i] + at);
  return total;
}

struct Control {
  alignas(128) std::atomic<uint64_t> arrivals;  // of all ranks at all meetings
  alignas(128) std::atomic<uint32_t> meeting;   // the last one to which all came, modulo 2^32
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> broken;
};

struct Arrived {
  alignas(128) std::atomic<uint64_t> meeting;  // the last one to which this rank came
  std::atomic<int32_t> core;                   // on which it was then
};

// Bytes before the first slot: whole pages.
int64_t control_bytes(int world) {
  return static_cast<int64_t>((sizeof(Control) + world * sizeof(Arrived) + 4095) / 4096 * 4096);
}

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

// Returns whether the time was up. Not FUTEX_PRIVATE: the word is in several processes.
bool sleep_while(std::atomic<uint32_t>* word, uint32_t value, double seconds) {
  const timespec limit{static_cast<time_t>(seconds), static_cast<long>(1e9 * (seconds - static_cast<time_t>(seconds)))};
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &limit, nullptr, 0) != 0 &&
         errno == ETIMEDOUT;
}

void wake_all(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

class SharedGroup {
 public:
  SharedGroup(uint8_t* memory, int rank, int world, int64_t slot_bytes, const int* sockets, bool spins)
      : control_(reinterpret_cast<Control*>(memory)),
        arrived_(reinterpret_cast<Arrived*>(memory + sizeof(Control))),
        slots_(memory + control_bytes(world)),
        rank_(rank),
        world_(world),
        slot_bytes_(slot_bytes),
        sockets_(sockets, sockets + world),
        spins_(spins) {}

  int rank() const { return rank_; }
  uint64_t meetings() const { return meetings_; }

  // From now on a meeting that takes longer breaks the group.
  void limit(double seconds) { seconds_ = seconds; }

  // A rank's slot at the next meeting.
  uint8_t* slot(int rank) const { return slot_at(meetings_ + 1, rank); }

  // Waits until all ranks have come to the next meeting: 0, or why that will not happen.
  uint32_t meet() {
    if (uint32_t reason = wait()) return reason;
    come();
    return wait();
  }

  // Comes to the next meeting, the last one being complete, and leaves the waiting to another call.
  void come() {
    const uint64_t number = ++meetings_;
    arrived_[rank_].core.store(sched_getcpu(), std::memory_order_relaxed);
    arrived_[rank_].meeting.store(number, std::memory_order_relaxed);
    waits_ = control_->arrivals.fetch_add(1) + 1 < number * world_;
    if (waits_) return;
    control_->meeting.store(static_cast<uint32_t>(number));
    if (control_->sleepers.load()) wake_all(&control_->meeting);
  }

  // Waits until all have come to the last meeting to which this rank came. Before that its slots must not be written: the
  // others may still read what they wanted of the meeting before.
  uint32_t wait() {
    if (!waits_) return 0;
    const uint64_t number = meetings_;
    const uint32_t word = static_cast<uint32_t>(number);
    const int patience = spins_ && !beside_missing(number) ? kSpins + kYields : 0;
    for (int i = 0; i < patience && !complete(word); ++i) {
      if (i < kSpins) {
        pause();
      } else {
        sched_yield();
      }
    }
    // Slices are counted, not the clock's time: that of a process that was frozen itself goes on.
    const double slice = std::min(kSlice, seconds_);
    for (double waited = 0; !complete(word);) {
      if (uint32_t reason = control_->broken.load()) return reason;
      control_->sleepers.fetch_add(1);
      if (!complete(word) && sleep_while(&control_->meeting, word - 1, slice)) waited += slice;
      control_->sleepers.fetch_sub(1);
      const int gone = ended();
      if (complete(word)) break;
      if (gone >= 0) return give_up(kEnded, gone);
      if (waited >= seconds_) return give_up(kSilent, missing(number));
    }
    waits_ = false;
    return 0;
  }

  // Puts this rank's columns beside those of the others, from the first rank's slot on: [rows, world row_bytes].
  uint32_t gather(const uint8_t* part, int64_t rows, int64_t row_bytes) {
    uint8_t* to = slot(0) + rank_ * row_bytes;
    for (int64_t row = 0; row < rows; ++row) std::memcpy(to + row * world_ * row_bytes, part + row * row_bytes, row_bytes);
    return meet();
  }

  // out = [residual +] the sum over the slots. A rank has a part in the first half of the sum (halves[rank] 1), the
  // second (2), or one in each (3), which lie one behind the other; null: all are in the first. Each half is summed in the
  // order of the ranks, then both. This rank's slot is written.
  uint32_t sum(const uint8_t* halves, const float* residual, float* out, int64_t count) {
    if (uint32_t reason = meet()) return reason;
    std::vector<const float*> parts[2];
    for (int rank = 0; rank < world_; ++rank) {
      const float* part = reinterpret_cast<const float*>(slot_at(meetings_, rank));
      const int in = halves ? halves[rank] : 1;
      if (in & 1) parts[0].push_back(part);
      if (in & 2) parts[1].push_back(in & 1 ? part + count : part);
    }
    if (parts[0].empty()) parts[0].swap(parts[1]);
    const int64_t pieces = std::min<int64_t>((count + kPiece - 1) / kPiece, threads());
    if (pieces <= 1) {
      add(parts, residual, out, 0, count);
      return 0;
    }
    const int64_t size = (count / pieces + kRun) / kRun * kRun;
    parallel(static_cast<int>(pieces), [&](int piece) {
      add(parts, residual, out, piece * size, std::min(count, (piece + 1) * size));
    });
    return 0;
  }

 private:
  uint8_t* slot_at(uint64_t meeting, int rank) const {
    return slots_ + (static_cast<int64_t>(meeting & 1) * world_ + rank) * slot_bytes_;
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  bool complete(uint32_t word) const { return control_->meeting.load(std::memory_order_acquire) == word; }

  // A rank whose process has closed its end of the socket to this one, or -1.
  int ended() const {
    for (int rank = 0; rank < world_; ++rank) {
      if (sockets_[rank] < 0) continue;
      pollfd one{sockets_[rank], 0, 0};
      if (poll(&one, 1, 0) == 1 && one.revents & (POLLHUP | POLLERR)) return rank;
    }
    return -1;
  }

  int missing(uint64_t number) const {
    for (int rank = 0; rank < world_; ++rank) {
      if (arrived_[rank].meeting.load(std::memory_order_relaxed) < number) return rank;
    }
    return rank_;
  }

  // Whether a rank that has not come is on this one's core, as far as known. To spin would be to wait for oneself; whoever
  // sleeps frees the core at once, and is woken on another one if there is any.
  bool beside_missing(uint64_t number) const {
    const int32_t core = sched_getcpu();
    for (int rank = 0; rank < world_; ++rank) {
      const Arrived& other = arrived_[rank];
      if (other.core.load(std::memory_order_relaxed) == core && other.meeting.load(std::memory_order_relaxed) < number) {
        return true;
      }
    }
    return false;
  }

  // The first reason holds for all ranks.
  uint32_t give_up(Reason reason, int rank) {
    uint32_t found = 0;
    const uint32_t mine = reason << 16 | static_cast<uint32_t>(rank);
    if (!control_->broken.compare_exchange_strong(found, mine)) return found;
    wake_all(&control_->meeting);
    return mine;
  }

  static void add(
      const std::vector<const float*> (&parts)[2], const float* residual, float* out, int64_t begin, int64_t end) {
    int64_t at = begin;
    for (; at + kRun <= end; at += kRun) {
      for (const auto& of_half : parts) {
        for (const float* part : of_half) __builtin_prefetch(part + at + kAhead);
      }
      add_at<Run>(parts, residual, out, at);
    }
    for (; at < end; ++at) add_at<float>(parts, residual, out, at);
  }

  template <class T>
  static void add_at(const std::vector<const float*> (&parts)[2], const float* residual, float* out, int64_t at) {
    T total = half_at<T>(parts[0], at);
    if (!parts[1].empty()) total += half_at<T>(parts[1], at);
    if (residual) total += load<T>(residual + at);
    std::memcpy(out + at, &total, sizeof(T));
  }

  Control* control_;
  Arrived* arrived_;
  uint8_t* slots_;
  int rank_;
  int world_;
  int64_t slot_bytes_;
  std::vector<int> sockets_;
  bool spins_;
  uint64_t meetings_ = 0;  // to which this rank has come
  bool waits_ = false;     // it has not seen yet that all came to the last one
  double seconds_ = 0;
};

float* room_of(const SharedGroup* group) { return reinterpret_cast<float*>(group->slot(group->rank())); }

uint32_t wait(SharedGroup* group) { return group->wait(); }

uint32_t sum(SharedGroup* group, const uint8_t* halves, const float* residual, float* out, int64_t count) {
  return group->sum(halves, residual, out, count);
}

}  // namespace headrace

using headrace::SharedGroup;

#pragma GCC visibility push(default)
extern "C" {

int64_t headrace_shared_control_bytes(int world) { return headrace::control_bytes(world); }

// One rank's view of memory that was all zero when the first rank opened it. `sockets`: for each rank a socket whose
// other end is that rank's and closes with its process, or -1. `spins`: every thread of every rank has a core. It lives
// as long as the process.
SharedGroup* headrace_shared_open(uint8_t* memory, int rank, int world, int64_t slot_bytes, const int* sockets, int spins) {
  return new SharedGroup(memory, rank, world, slot_bytes, sockets, spins != 0);
}

uint64_t headrace_shared_meetings(const SharedGroup* group) { return group->meetings(); }

void headrace_shared_limit(SharedGroup* group, double seconds) { group->limit(seconds); }

uint32_t headrace_shared_meet(SharedGroup* group) { return group->meet(); }

void headrace_shared_come(SharedGroup* group) { group->come(); }

uint32_t headrace_shared_wait(SharedGroup* group) { return group->wait(); }

uint32_t headrace_shared_gather(SharedGroup* group, const uint8_t* part, int64_t rows, int64_t row_bytes) {
  return group->gather(part, rows, row_bytes);
}

uint32_t headrace_shared_sum(
    SharedGroup* group, const uint8_t* halves, const float* residual, float* out, int64_t count) {
  return group->sum(halves, residual, out, count);
}

}  // extern "C"
#pragma GCC visibility pop
