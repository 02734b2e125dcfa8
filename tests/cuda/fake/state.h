// The fake driver's settings, counters and cards.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

// CUresult, as far as it is given
enum Result {
  OK = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  INVALID_CONTEXT = 201,
  INVALID_HANDLE = 400,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ALREADY_REGISTERED = 712,
  NOT_REGISTERED = 713,
  LAUNCH_FAILED = 719,
  NOT_SUPPORTED = 801,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURE_ISOLATION = 905,
  CAPTURED_EVENT = 907,
  UNKNOWN = 999,
};

// What a test reads: first what there is now, then what has happened. See environ.py.
#define COUNTERS(X)                                                                                     \
  X(contexts) X(streams) X(events) X(graphs) X(executables) X(modules) X(allocations) X(allocated_bytes) \
  X(registrations) X(registered_bytes) X(pinned) X(pinned_bytes)                                        \
  X(launches) X(products) X(copies) X(captures) X(graph_launches)                                       \
  X(unregistered_copies) X(early_releases) X(overruns) X(kernel_errors) X(capture_errors)
namespace counted {
enum Counter {
#define X(name) name,
  COUNTERS(X)
#undef X
      END
};
}
using counted::Counter;
inline const char* counter_names() {
  return
#define X(name) #name "\n"
      COUNTERS(X)
#undef X
          ;
}

enum Mode { LAZY, EAGER, RANDOM };

struct Card {  // a context is the address of its card: there are primary contexts only
  int index = 0, retained = 0;
  size_t used = 0;
};

constexpr int MOST_CARDS = 16;
constexpr int MOST_SHARED = 227 << 10;  // dynamic shared memory of a block that asks for it

struct State {
  std::recursive_mutex mutex;
  Mode mode = LAZY;
  uint64_t seed = 0;
  bool run = true;  // whether kernels and products are run; without, copies are all that happens
  size_t card_bytes = 4ull << 30;
  Card cards[MOST_CARDS];
  int card_count = 1;
  int sticky = OK;  // a failed kernel: every later call gives this
  uint64_t* counts = nullptr;
  uint64_t own[counted::END] = {};
};
inline State state;
inline thread_local std::vector<Card*> contexts;  // the driver's stack of this thread
#define LOCKED std::lock_guard<std::recursive_mutex> locked_(state.mutex)

inline Card* current() { return contexts.empty() ? nullptr : contexts.back(); }
#define IN_CONTEXT \
  LOCKED;          \
  if (!current()) return INVALID_CONTEXT

inline void count(Counter c, int64_t by = 1) { state.counts[c] += by; }

__attribute__((format(printf, 1, 2))) inline void say(const char* format, ...) {
  char text[600];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  fprintf(stderr, "fakecuda: %s\n", text);
}

inline uint64_t random_number() {
  state.seed = state.seed * 6364136223846793005ull + 1442695040888963407ull;
  return state.seed >> 33;
}

inline void set_mode(const char* text) {
  state.mode = !strncmp(text, "random", 6) ? RANDOM : !strcmp(text, "eager") ? EAGER : LAZY;
  const char* colon = strchr(text, ':');
  state.seed = colon ? strtoull(colon + 1, nullptr, 10) * 2 + 1 : 1;
}

// A file per process, readable while it runs and after it was killed: the names, a line each, and at 4096 the numbers.
inline uint64_t* shared_counters(const char* folder) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%d", folder, (int)getpid());
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || ftruncate(file, 8192)) return nullptr;
  char* at = (char*)mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (at == MAP_FAILED) return nullptr;
  strcpy(at, counter_names());
  return (uint64_t*)(at + 4096);
}

__attribute__((constructor)) inline void read_environment() {
  auto get = [](const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
  };
  set_mode(get("FAKECUDA_MODE", "lazy"));
  state.card_count = std::min(MOST_CARDS, atoi(get("FAKECUDA_CARDS", "1")));
  for (int i = 0; i < MOST_CARDS; ++i) state.cards[i].index = i;
  state.card_bytes = strtoull(get("FAKECUDA_BYTES", "4294967296"), nullptr, 10);
  state.run = strcmp(get("FAKECUDA_RUN", "on"), "off");
  const char* folder = getenv("FAKECUDA_COUNTERS");
  state.counts = folder && *folder ? shared_counters(folder) : nullptr;
  if (!state.counts) state.counts = state.own;
}
