// A team of threads that walk through the phases of one step together.
//
// A phase is over when its jobs are done, not when every thread has come: a thread that has lost its processor holds up the
// others only if it lost it in the middle of a job. When it comes back it runs through the phases that it missed without
// touching them. Jobs are handed out by contiguous ranges with stealing, so memory is streamed. Who waits spins briefly,
// then yields, then sleeps: other processes share these processors.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Team {
 public:
  explicit Team(int threads) : size_(threads < 1 ? 1 : threads), cursors_(size_), phases_(size_) {
    for (int t = 1; t < size_; t++) threads_.emplace_back([this, t] { serve(t); });
  }

  ~Team() {
    work_ = nullptr;
    next(round_);
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs work(thread) on every thread and returns when all have left it.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    inside_.store(size_ - 1, std::memory_order_relaxed);
    next(round_);
    work(0);
    for (int left; (left = inside_.load(std::memory_order_acquire)) != 0;) await(inside_, left);
  }

  // Whether the thread's next phase is already over.
  bool late(int thread) const { return done_phases_.load(std::memory_order_relaxed) != (int)phases_[thread].value; }

  // One phase: body(job) for each of `jobs`, once, on some thread; returns when all are done. Every thread calls it with the
  // same `jobs`. A thread that is late may find what the phase reads already overwritten, but then no job is left for it.
  template <class Body>
  void share(int thread, int jobs, const Body& body) {
    if (jobs <= 0) return;
    const uint32_t phase = phases_[thread].value++;
    if (done_phases_.load(std::memory_order_acquire) != (int)phase) return;  // it is over: they end in order
    for (int i = 0; i < size_; i++) {
      const int owner = (thread + i) % size_;
      const int first = (int)((int64_t)jobs * owner / size_), count = (int)((int64_t)jobs * (owner + 1) / size_) - first;
      for (int job; (job = take(cursors_[owner], phase, count)) >= 0;) {
        body(first + job);
        if (jobs_done_.fetch_add(1, std::memory_order_acq_rel) == jobs - 1) return finish(phase);
      }
    }
    await(done_phases_, (int)phase);
  }

 private:
  static constexpr int SPINS = 64, YIELD_US = 1000;

  struct alignas(64) Cursor {
    std::atomic<uint64_t> value{0};  // phase << 32 | jobs taken
  };
  struct alignas(64) Phase {
    uint32_t value = 0;  // of the thread's next `share`
  };

  // A job of the phase, counted from 0, or -1 if none is left (or the phase is over).
  static int take(Cursor& cursor, uint32_t phase, int count) {
    uint64_t now = cursor.value.load(std::memory_order_acquire);
    while ((uint32_t)(now >> 32) == phase && (int)(uint32_t)now < count)
      if (cursor.value.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return (int)(uint32_t)now;
    return -1;
  }

  // The last job is done: open the next phase.
  void finish(uint32_t phase) {
    jobs_done_.store(0, std::memory_order_relaxed);
    for (Cursor& cursor : cursors_) cursor.value.store((uint64_t)(phase + 1) << 32, std::memory_order_release);
    next(done_phases_);
  }

  static void next(std::atomic<int>& counter) {
    counter.fetch_add(1, std::memory_order_acq_rel);
    counter.notify_all();
  }

  // Returns once `counter` is no longer `seen`.
  static void await(const std::atomic<int>& counter, int seen) {
    for (int i = 0; i < SPINS; i++) {
      if (counter.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
    const auto start = std::chrono::steady_clock::now();
    do {
      sched_yield();
      if (counter.load(std::memory_order_acquire) != seen) return;
    } while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(YIELD_US));
    while (counter.load(std::memory_order_acquire) == seen) counter.wait(seen, std::memory_order_acquire);
  }

  void serve(int thread) {
    for (int seen = 0;; seen++) {
      await(round_, seen);
      if (!work_) return;
      (*work_)(thread);
      inside_.fetch_sub(1, std::memory_order_acq_rel);
      inside_.notify_all();
    }
  }

  const int size_;
  std::vector<Cursor> cursors_;
  std::vector<Phase> phases_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<int> round_{0};
  alignas(64) std::atomic<int> inside_{0};  // threads that have not left this run
  alignas(64) std::atomic<int> jobs_done_{0};
  alignas(64) std::atomic<int> done_phases_{0};
};
