// A team of threads that walk through the phases of one step together. Work within a phase is handed out by contiguous
// ranges with stealing, so memory is streamed and a thread that loses its processor delays nobody by more than one job.
// Waiting spins briefly, then yields, then (between steps) sleeps: other processes share these processors.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#include <sched.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Team {
 public:
  explicit Team(int threads) : size_(threads < 1 ? 1 : threads), cursors_(RING * size_), phases_(size_) {
    for (int t = 1; t < size_; t++) threads_.emplace_back([this, t] { serve(t); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      round_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs work(thread) on every thread and returns when all are done.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    work(0);
    barrier();
  }

  // Waits until every thread of the team has come here.
  void barrier() {
    if (size_ == 1) return;
    int round = barrier_round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      barrier_round_.fetch_add(1, std::memory_order_release);
      return;
    }
    for (int spins = 0; barrier_round_.load(std::memory_order_acquire) == round; spins++) relax(spins);
  }

  // One phase: body(job) for each of `jobs`, once, on some thread. Every thread calls it with the same `jobs`, and all wait
  // for the end.
  template <class Body>
  void share(int thread, int jobs, const Body& body) {
    int phase = (int)((unsigned)phases_[thread].value++ % RING);
    Cursor* now = &cursors_[phase * size_];
    if (thread == 0) reset(&cursors_[((phase + 2) % RING) * size_]);  // two barriers away from any use
    for (int i = 0; i < size_; i++) {
      int owner = (thread + i) % size_;
      int first = (int)((int64_t)jobs * owner / size_), last = (int)((int64_t)jobs * (owner + 1) / size_);
      for (int job; (job = first + now[owner].next.fetch_add(1, std::memory_order_relaxed)) < last;) body(job);
    }
    barrier();
  }

 private:
  static constexpr int RING = 4;
  struct alignas(64) Cursor {
    std::atomic<int> next{0};
  };

  struct alignas(64) Phase {
    int value = 0;
  };

  static void relax(int spins) {
    if (spins > 3000) {
      sched_yield();
      return;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  void reset(Cursor* cursors) {
    for (int i = 0; i < size_; i++) cursors[i].next.store(0, std::memory_order_relaxed);
  }

  void serve(int thread) {
    int seen = 0;
    for (;;) {
      for (int spins = 0; spins < 4000 && round_.load(std::memory_order_acquire) == seen; spins++) relax(0);
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
      }
      seen++;
      if (stop_) return;
      (*work_)(thread);
      barrier();
    }
  }

  const int size_;
  std::vector<Cursor> cursors_;  // of the last phases, a ring
  std::vector<Phase> phases_;    // how many phases each thread has begun
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> round_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> barrier_round_{0};
  const std::function<void(int)>* work_ = nullptr;
  bool stop_ = false;
};
