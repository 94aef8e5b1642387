// The process's worker threads. Work is cut into chunks. Each thread has its share of them, side by side in memory, and takes
// from those of others when it is through: a thread that lost its core to another process holds up at most the one chunk it
// is in, and one that has not woken up yet holds up nobody.
#pragma once

namespace headrace {

using Task = void (*)(void* argument, int chunk);
constexpr int kMaxChunks = 65535;

// Threads that work, the caller included. Waits for running work.
void set_threads(int count);
int threads();

// Calls task(argument, 0..chunks-1), each once, in any order and on any thread; returns when all are done.
// Callers on different threads take turns.
void run(int chunks, Task task, void* argument);

template <class F>
void parallel(int chunks, const F& body) {
  run(chunks, [](void* argument, int chunk) { (*static_cast<const F*>(argument))(chunk); }, const_cast<F*>(&body));
}

}  // namespace headrace
