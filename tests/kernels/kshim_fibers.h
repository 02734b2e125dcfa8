// How a CUDA kernel runs on the CPU: a fiber per thread, blocks one after another, barriers and warp collectives as switches.
//
// For correctness only. kshim.h, which includes this file, holds the language. A launch has an order (forward, reverse or
// random): which fiber runs first among those that can, and when an asynchronous copy lands. Shared memory starts as NaN.
// Errors have names: deadlock, collectives that do not match, copies nobody waited for, wrong parameters.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <type_traits>
#include <utility>
#include <sys/mman.h>
#if defined(__SANITIZE_ADDRESS__)
#define KSHIM_ASAN 1
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#define KSHIM_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__) || defined(KSHIM_UCONTEXT)
#define KSHIM_USE_UCONTEXT 1
#include <ucontext.h>
#endif

// The scheduler itself must not look like an access of a CUDA thread.
#define KSHIM_INTERNAL __attribute__((noinline, no_sanitize("thread")))

struct uint3 {
  unsigned x, y, z;
};

namespace kshim {

enum State : uint8_t { READY, AT_BARRIER, AT_COLLECTIVE, DONE };
enum Op : uint8_t { OP_SYNC, OP_SHUFFLE, OP_BALLOT, OP_REDUCE, OP_MMA, OP_LDMATRIX };
enum Order : int { FORWARD, REVERSE, RANDOM };

constexpr unsigned MAX_THREADS = 1024, MAX_COPIES = 512, MAX_GROUPS = 32;
#if defined(KSHIM_ASAN) || defined(KSHIM_TSAN)
constexpr size_t STACK = 256 << 10;
#else
constexpr size_t STACK = 64 << 10;
#endif

struct Copy {
  void* dst;
  const void* src;
  unsigned bytes, zeros;  // bytes 0: done already
};

struct Fiber {
  uint3 tid;
  unsigned linear, lane, warp;
  State state;
  Op op;           // what it waits at, with its mask and arguments
  unsigned mask;
  int argument;    // source lane, or kind of the reduction
  uint64_t value, result;
  void* payload;
#ifdef KSHIM_USE_UCONTEXT
  ucontext_t context;
#else
  void* sp;
#endif
  char* stack;
  bool waits;  // at its loop's end, for the next block
  Copy copies[MAX_COPIES];  // cp.async: issued and not yet waited for, oldest first
  unsigned copy_count, group_count, group_end[MAX_GROUPS];
  void* fake_stack;   // ASan's
  void* tsan;
};

struct Global {
  Fiber* current = nullptr;
  uint3 block_index{}, block_dim{}, grid_dim{};
  char* dynamic = nullptr;  // dynamic shared memory
  Fiber* fibers = nullptr;
  unsigned count = 0, live = 0, at_barrier = 0;
  unsigned votes = 0, vote_result = 0;
  char error[512] = {0};
  uint64_t switches = 0, random = 0;
  int order = FORWARD;
  void (*entry)(void*) = nullptr;
  void* entry_argument = nullptr;
#ifdef KSHIM_USE_UCONTEXT
  ucontext_t main_context;
#else
  void* main_sp = nullptr;
#endif
  void* main_fake = nullptr;
  const void* main_bottom = nullptr;
  size_t main_size = 0;
  void* main_tsan = nullptr;
  char barrier_tag = 0, warp_tags[MAX_THREADS / 32] = {0}, launch_tag = 0, exit_tag = 0;
};
inline Global g;

#ifndef KSHIM_USE_UCONTEXT
// Saves the registers a callee must keep and swaps stacks; swapcontext would make two system calls a switch.
__attribute__((naked, noinline)) inline void raw_switch(void** /*save*/, void* /*load*/) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}
#endif

KSHIM_INTERNAL inline void to_scheduler(Fiber* f) {
#ifdef KSHIM_ASAN
  __sanitizer_start_switch_fiber(&f->fake_stack, g.main_bottom, g.main_size);
#endif
#ifdef KSHIM_TSAN
  __tsan_release(&g.exit_tag);  // acquired by the launcher only, after the block
  __tsan_switch_to_fiber(g.main_tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef KSHIM_USE_UCONTEXT
  swapcontext(&f->context, &g.main_context);
#else
  raw_switch(&f->sp, g.main_sp);
#endif
#ifdef KSHIM_ASAN
  __sanitizer_finish_switch_fiber(f->fake_stack, &g.main_bottom, &g.main_size);
#endif
}

KSHIM_INTERNAL inline void resume(Fiber* f) {
  g.current = f;
  ++g.switches;
#ifdef KSHIM_ASAN
  __sanitizer_start_switch_fiber(&g.main_fake, f->stack, STACK);
#endif
#ifdef KSHIM_TSAN
  __tsan_switch_to_fiber(f->tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef KSHIM_USE_UCONTEXT
  swapcontext(&g.main_context, &f->context);
#else
  raw_switch(&g.main_sp, f->sp);
#endif
#ifdef KSHIM_ASAN
  __sanitizer_finish_switch_fiber(g.main_fake, nullptr, nullptr);
#endif
}

// A fiber runs one thread of each block and returns from it: TSan counts the frames that are open.
KSHIM_INTERNAL inline void fiber_main() {
#ifdef KSHIM_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &g.main_bottom, &g.main_size);
#endif
  for (;;) {
#ifdef KSHIM_TSAN
    __tsan_acquire(&g.launch_tag);
#endif
    g.entry(g.entry_argument);
    g.current->state = DONE;
    to_scheduler(g.current);
  }
}

// The first error counts; the launch ends with it.
KSHIM_INTERNAL inline void fail(const char* format, unsigned a = 0, unsigned b = 0, unsigned c = 0) {
  if (g.error[0]) return;
  int n = snprintf(g.error, sizeof g.error, "block (%u,%u,%u): ", g.block_index.x, g.block_index.y, g.block_index.z);
  snprintf(g.error + n, sizeof g.error - n, format, a, b, c);
}
// ... for a thread that cannot go on.
KSHIM_INTERNAL inline void stop(const char* format, unsigned a = 0, unsigned b = 0, unsigned c = 0) {
  fail(format, a, b, c);
  g.current->state = AT_BARRIER;
  to_scheduler(g.current);
}

KSHIM_INTERNAL inline uint64_t random_bits() {
  g.random = g.random * 6364136223846793005ull + 1442695040888963407ull;
  return g.random >> 33;
}

// A fiber that has never run, or that an error left in the middle of a kernel, begins anew.
KSHIM_INTERNAL inline void prepare(Fiber* f) {
  if (f->waits) return;
  f->waits = true;
#ifdef KSHIM_TSAN
  if (f->tsan) __tsan_destroy_fiber(f->tsan);
  f->tsan = __tsan_create_fiber(0);
#endif
#ifdef KSHIM_ASAN
  f->fake_stack = nullptr;
  __asan_unpoison_memory_region(f->stack, STACK);
#endif
#ifdef KSHIM_USE_UCONTEXT
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack;
  f->context.uc_stack.ss_size = STACK;
  f->context.uc_link = nullptr;
  makecontext(&f->context, (void (*)())fiber_main, 0);
#else
  void** sp = (void**)(f->stack + STACK);
  *--sp = nullptr;            // keeps rsp % 16 == 8 where fiber_main begins
  *--sp = (void*)fiber_main;  // where raw_switch returns to
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  f->sp = sp;
#endif
}

inline Fiber* fiber_of(unsigned warp, unsigned lane) {
  unsigned i = warp * 32 + lane;
  return i < g.count ? g.fibers + i : nullptr;
}

}  // namespace kshim
#include "kshim_warp.h"
namespace kshim {

// blocks -------------------------------------------------------------------------------------------------------------
// Threads that have exited count as arrived, as on the hardware.
KSHIM_INTERNAL inline void try_barrier() {
  if (!g.live || g.at_barrier != g.live) return;
  for (unsigned i = 0; i < g.count; ++i)
    if (g.fibers[i].state == AT_BARRIER) g.fibers[i].state = READY;
  g.at_barrier = 0;
  g.vote_result = g.votes;
  g.votes = 0;
}

KSHIM_INTERNAL inline unsigned barrier(bool vote) {
  g.current->state = AT_BARRIER;
  g.votes += vote;
  ++g.at_barrier;
#ifdef KSHIM_TSAN
  __tsan_release(&g.barrier_tag);
#endif
  try_barrier();
  to_scheduler(g.current);
#ifdef KSHIM_TSAN
  __tsan_acquire(&g.barrier_tag);
#endif
  return g.vote_result;
}

extern "C" char __start_kshim_shared[] __attribute__((weak));
extern "C" char __stop_kshim_shared[] __attribute__((weak));

// NaN as float and as bf16, -1 as int
__attribute__((noinline, no_sanitize("address", "thread"))) inline void poison(char* from, char* to) {
  for (volatile char* p = from; p < to; ++p) *p = (char)0xff;
}

KSHIM_INTERNAL inline void run_block() {
  const unsigned warps = (g.count + 31) / 32;
  g.live = g.count;
  g.at_barrier = g.votes = 0;
  for (unsigned i = 0; i < g.count; ++i) {
    Fiber* f = g.fibers + i;
    f->linear = i;
    f->lane = i & 31;
    f->warp = i >> 5;
    f->tid = {i % g.block_dim.x, i / g.block_dim.x % g.block_dim.y, i / (g.block_dim.x * g.block_dim.y)};
    f->state = READY;
    f->copy_count = f->group_count = 0;
    prepare(f);
  }
  while (g.live && !g.error[0]) {
    bool ran = false;
    unsigned first_warp = g.order == RANDOM ? random_bits() % warps : 0;
    for (unsigned wi = 0; wi < warps && !g.error[0]; ++wi) {
      unsigned w = g.order == REVERSE ? warps - 1 - wi : (wi + first_warp) % warps;
      for (bool again = true; again && !g.error[0];) {  // one warp runs as far as it can
        again = false;
        unsigned first_lane = g.order == RANDOM ? random_bits() % 32 : 0;
        for (unsigned li = 0; li < 32 && !g.error[0]; ++li) {
          Fiber* f = fiber_of(w, g.order == REVERSE ? 31 - li : (li + first_lane) % 32);
          if (!f || f->state != READY) continue;
          resume(f);
          again = ran = true;
          if (f->state != DONE) continue;
          if (f->copy_count) fail("thread %u exits with cp.async copies never waited for", f->linear);
          --g.live;
          try_barrier();
        }
        if (g.order == RANDOM && !(random_bits() & 3)) break;  // ... or another warp comes in between
      }
    }
    if (!ran && g.live && !g.error[0]) {
      unsigned barriers = 0, collectives = 0, who = 0;
      for (unsigned i = 0; i < g.count; ++i) {
        barriers += g.fibers[i].state == AT_BARRIER;
        if (g.fibers[i].state == AT_COLLECTIVE) ++collectives, who = i;
      }
      fail("deadlock: %u threads wait at __syncthreads, %u at a warp collective (thread %u among them)", barriers, collectives,
           who);
    }
  }
  for (unsigned i = 0; i < g.count; ++i) g.fibers[i].waits = g.fibers[i].state == DONE;
}
}  // namespace kshim
