// A team of threads that walk through the phases of one step together. Work within a phase is handed out by contiguous
// ranges with stealing, so memory is streamed and a thread that loses its processor delays nobody by more than one job.
// Who waits spins for some microseconds and then sleeps. Other processes share these processors: a sleeper's processor is
// free for the thread that everybody waits for (spinning on made steps three times slower than one thread alone).
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

class Team {
 public:
  explicit Team(int threads) : size_(threads < 1 ? 1 : threads), cursors_(RING * size_), phases_(size_) {
    for (int t = 1; t < size_; t++) threads_.emplace_back([this, t] { serve(t); });
  }

  ~Team() {
    work_ = nullptr;
    next(round_);
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs work(thread) on every thread and returns when all are done.
  void run(const std::function<void(int)>& work) {
    work_ = &work;
    next(round_);
    work(0);
    barrier();
  }

  // One phase: body(job) for each of `jobs`, once, on some thread. Every thread calls it with the same `jobs`, and all wait
  // for the end.
  template <class Body>
  void share(int thread, int jobs, const Body& body) {
    const int phase = (int)(phases_[thread].value++ % RING);
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
  static constexpr int RING = 4, SPIN_US = 40;
  struct alignas(64) Cursor {
    std::atomic<int> next{0};
  };
  struct alignas(64) Phase {
    unsigned value = 0;
  };

  static void next(std::atomic<int>& counter) {
    counter.fetch_add(1, std::memory_order_release);
    counter.notify_all();
  }

  // Returns once `counter` is no longer `seen`.
  static void await(const std::atomic<int>& counter, int seen) {
    const auto start = std::chrono::steady_clock::now();
    do {
      for (int i = 0; i < 64; i++) {
        if (counter.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
        _mm_pause();
#endif
      }
    } while (std::chrono::steady_clock::now() - start < std::chrono::microseconds(SPIN_US));
    while (counter.load(std::memory_order_acquire) == seen) counter.wait(seen, std::memory_order_acquire);
  }

  // Waits until every thread of the team has come here.
  void barrier() {
    if (size_ == 1) return;
    const int seen = passed_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < size_ - 1) return await(passed_, seen);
    arrived_.store(0, std::memory_order_relaxed);
    next(passed_);
  }

  void reset(Cursor* cursors) {
    for (int i = 0; i < size_; i++) cursors[i].next.store(0, std::memory_order_relaxed);
  }

  void serve(int thread) {
    for (int seen = 0;; seen++) {
      await(round_, seen);
      if (!work_) return;
      (*work_)(thread);
      barrier();
    }
  }

  const int size_;
  std::vector<Cursor> cursors_;  // of the last phases, a ring
  std::vector<Phase> phases_;    // how many phases each thread has begun
  std::vector<std::thread> threads_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<int> round_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> passed_{0};
};
