// The fake driver's streams: queues of operations that run as late as allowed (lazy), at once (eager) or at random.
//
// An event is a position in a stream's queue. A stream that waits for one has an operation that runs the other stream up to
// there. So what is not ordered by an event, a stream or a synchronisation does run in the wrong order in some mode.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <set>

#include "state.h"

struct Op {
  std::function<void()> run;
  uintptr_t host = 0;  // a copy's page-locked side
  size_t host_bytes = 0;
  bool is_kernel = false;
};

struct Stream {
  std::deque<std::shared_ptr<Op>> queue;
  uint64_t done = 0, put = 0;  // operations so far
  bool alive = true;
};

struct Event {
  Stream* stream = nullptr;
  uint64_t at = 0;
  bool in_capture = false;
};

struct Graph {
  std::vector<std::shared_ptr<Op>> ops;
};

struct Capture {
  Stream* stream = nullptr;
  std::shared_ptr<Graph> graph;
  int broken = OK;
};

inline Stream null_stream;
inline std::vector<Stream*> streams{&null_stream};  // never shrinks: events point into it
inline thread_local Capture capture;                // thread-local mode: one capture a thread is all that is used

inline Stream* stream_of(void* handle) { return handle ? (Stream*)handle : &null_stream; }

inline void drain(Stream* s, uint64_t upto) {
  while (s->done < upto && !s->queue.empty()) {
    std::shared_ptr<Op> op = s->queue.front();  // it is pending until it has run
    op->run();
    s->queue.pop_front();
    ++s->done;
  }
}

inline void drain_all() {
  for (Stream* s : streams) drain(s, s->put);
}

// Polling makes progress, so that who polls comes to an end.
inline void poll(Stream* s, uint64_t upto) {
  uint64_t some = state.mode == RANDOM ? 1 + random_number() % 8 : 4;
  if (s->done < upto) drain(s, std::min(upto, s->done + some));
}

inline void enqueue(Stream* s, std::shared_ptr<Op> op) {
  if (op->is_kernel && !state.run) return;
  s->queue.push_back(std::move(op));
  ++s->put;
  if (state.mode == EAGER) drain(s, s->put);
  if (state.mode != RANDOM) return;
  for (Stream* x : streams)
    if (x->done < x->put && random_number() % 3 == 0) drain(x, x->done + 1 + random_number() % (x->put - x->done));
}

// Enqueue, or put into the graph that is being captured.
inline int submit(Stream* s, Op op) {
  if (state.sticky) return state.sticky;
  auto shared = std::make_shared<Op>(std::move(op));
  if (capture.stream == s) {
    if (capture.broken) return CAPTURE_INVALIDATED;
    capture.graph->ops.push_back(std::move(shared));
    return OK;
  }
  enqueue(s, std::move(shared));
  return OK;
}

// What may not be called while this thread captures: it spoils the capture, as the driver has it.
inline int spoils_capture(const char* call, int result = CAPTURE_UNSUPPORTED) {
  if (!capture.stream) return OK;
  say("%s while a stream is captured", call);
  count(counted::capture_errors);
  capture.broken = result;
  return result;
}
#define NOT_IN_CAPTURE(call) \
  if (int r_ = spoils_capture(call)) return r_

inline bool uses_host(const Op& op, uintptr_t at, size_t bytes) { return op.host < at + bytes && at < op.host + op.host_bytes; }

// Whether an operation that has not run yet copies to or from these bytes of host memory.
inline bool pending_use(uintptr_t at, size_t bytes) {
  for (Stream* s : streams)
    for (auto& op : s->queue)
      if (uses_host(*op, at, bytes)) return true;
  return false;
}

inline bool anything_pending() {
  for (Stream* s : streams)
    if (!s->queue.empty()) return true;
  return false;
}
