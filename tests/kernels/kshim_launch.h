// How a test or the fake driver launches a kernel that kshim.h runs: parameters, grid, checks of the launch.
#pragma once

namespace kshim {

struct Launch {
  unsigned grid[3], block[3], shared;
  int order;
  uint64_t seed, switches;
  char error[512];
};

template <class... A>
struct Bound {
  void (*kernel)(A...);
  void* const* parameters;
};

template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void* const* p, std::index_sequence<I...>) {
  kernel(*(std::decay_t<A>*)p[I]...);
}
template <class... A>
inline void enter(void* bound) {
  auto* b = (Bound<A...>*)bound;
  call(b->kernel, b->parameters, std::index_sequence_for<A...>{});
}

inline std::mutex& one_at_a_time() {
  static std::mutex m;
  return m;
}

KSHIM_INTERNAL inline void make_fibers() {
  if (g.fibers) return;
  g.fibers = new Fiber[MAX_THREADS]();
  for (unsigned i = 0; i < MAX_THREADS; ++i) {
    char* m = (char*)mmap(nullptr, STACK + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(m, 4096, PROT_NONE);  // a stack that is too small ends the process, not another thread's data
    g.fibers[i].stack = m + 4096;
  }
}

KSHIM_INTERNAL inline void launch_block(uint64_t i, const Launch* l) {
  const uint64_t x = l->grid[0], y = l->grid[1];
  g.block_index = {unsigned(i % x), unsigned(i / x % y), unsigned(i / (x * y))};
  // Of exact size and fresh for each block: ASan's red zones then guard dynamic shared memory too.
  const size_t rounded = (l->shared + 127) / 128 * 128;
  g.dynamic = l->shared ? (char*)aligned_alloc(128, rounded) : nullptr;
  if (g.dynamic) poison(g.dynamic, g.dynamic + l->shared);
#ifdef KSHIM_ASAN
  if (g.dynamic) __asan_poison_memory_region(g.dynamic + l->shared, rounded - l->shared);
#endif
  if (__start_kshim_shared) poison(__start_kshim_shared, __stop_kshim_shared);
#ifdef KSHIM_TSAN
  __tsan_release(&g.launch_tag);  // a block starts after all that came before it: races between blocks are not seen
#endif
  run_block();
#ifdef KSHIM_TSAN
  __tsan_acquire(&g.exit_tag);
#endif
#ifdef KSHIM_ASAN
  if (g.dynamic) __asan_unpoison_memory_region(g.dynamic, rounded);
#endif
  free(g.dynamic);
  g.dynamic = nullptr;
}

// 0, or an error that l->error names: 1 the launch, 2 the kernel, 3 the parameters.
template <class... A>
KSHIM_INTERNAL int launch(void (*kernel)(A...), Launch* l, void* const* parameters) {
  std::lock_guard<std::mutex> lock(one_at_a_time());
  Bound<A...> bound{kernel, parameters};
  g.entry = enter<A...>;
  g.entry_argument = &bound;
  g.error[0] = 0;
  g.switches = 0;
  g.order = l->order;
  g.random = l->seed * 2 + 1;
  const uint64_t threads = (uint64_t)l->block[0] * l->block[1] * l->block[2], x = l->grid[0], y = l->grid[1], z = l->grid[2];
  const bool fits = threads && threads <= MAX_THREADS && l->shared <= 227u * 1024;
  if (!fits || !x || x > 0x7fffffff || !y || y > 65535 || !z || z > 65535) {
    snprintf(l->error, sizeof l->error, "invalid launch: grid (%u,%u,%u), block of %u threads, %u bytes of shared memory",
             l->grid[0], l->grid[1], l->grid[2], (unsigned)threads, l->shared);
    return 1;
  }
  make_fibers();
#ifdef KSHIM_TSAN
  g.main_tsan = __tsan_get_current_fiber();
#endif
  g.count = (unsigned)threads;
  g.block_dim = {l->block[0], l->block[1], l->block[2]};
  g.grid_dim = {l->grid[0], l->grid[1], l->grid[2]};
  const uint64_t blocks = x * y * z;
  const uint64_t first = l->order == RANDOM ? random_bits() % blocks : 0;
  for (uint64_t i = 0; i < blocks && !g.error[0]; ++i)
    launch_block(l->order == REVERSE ? blocks - 1 - i : (i + first) % blocks, l);
  l->switches = g.switches;
  memcpy(l->error, g.error, sizeof l->error);
  return g.error[0] ? 2 : 0;
}

// cuLaunchKernel's packed parameters: in order of declaration, each at its natural alignment.
template <class... A>
inline int launch_packed(void (*kernel)(A...), Launch* l, char* buffer, size_t bytes) {
  constexpr size_t N = sizeof...(A);
  const size_t sizes[N + 1] = {sizeof(std::decay_t<A>)..., 0}, aligns[N + 1] = {alignof(std::decay_t<A>)..., 1};
  void* p[N + 1];
  size_t at = 0;
  for (size_t i = 0; i < N; ++i) {
    at = (at + aligns[i] - 1) / aligns[i] * aligns[i];
    p[i] = buffer + at;
    at += sizes[i];
  }
  if (at != bytes) {
    snprintf(l->error, sizeof l->error, "parameters of %zu bytes, the kernel takes %zu", bytes, at);
    return 3;
  }
  return launch(kernel, l, p);
}

// A letter a parameter: f i I q Q d for values as in Python's struct, pointers with P and the letter of what they point to
// (PH for bf16, Pv for anything else).
template <class T>
constexpr const char* letter() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_pointer_v<U>) {
    using V = std::remove_cv_t<std::remove_pointer_t<U>>;
    if constexpr (std::is_same_v<V, float>) return "Pf";
    else if constexpr (std::is_same_v<V, double>) return "Pd";
    else if constexpr (std::is_same_v<V, int>) return "Pi";
    else if constexpr (std::is_same_v<V, unsigned>) return "PI";
    else if constexpr (std::is_same_v<V, long long>) return "Pq";
    else if constexpr (std::is_same_v<V, unsigned long long>) return "PQ";
    else if constexpr (std::is_same_v<V, unsigned short>) return "PH";
    else if constexpr (std::is_same_v<V, unsigned char>) return "PB";
    else return "Pv";
  }
  else if constexpr (std::is_same_v<U, float>) return "f";
  else if constexpr (std::is_same_v<U, double>) return "d";
  else if constexpr (std::is_same_v<U, int>) return "i";
  else if constexpr (std::is_same_v<U, unsigned>) return "I";
  else if constexpr (std::is_same_v<U, long long>) return "q";
  else {
    static_assert(std::is_same_v<U, unsigned long long>, "a kernel takes pointers, int, unsigned, 64-bit, float or double");
    return "Q";
  }
}
template <class... A>
inline void describe(void (*)(A...), char* text, size_t size) {
  text[0] = 0;
  for (const char* l : {letter<A>()...}) snprintf(text + strlen(text), size - strlen(text), "%s ", l);
}
}  // namespace kshim

#define KSHIM_API extern "C" __attribute__((visibility("default")))
#define KERNEL_EXPORT(kernel)                                                    \
  KSHIM_API int kernel##__launch(kshim::Launch* l, void** parameters) {          \
    return kshim::launch(kernel, l, parameters);                                 \
  }                                                                              \
  KSHIM_API int kernel##__launch_packed(kshim::Launch* l, char* p, size_t n) {   \
    return kshim::launch_packed(kernel, l, p, n);                                \
  }                                                                              \
  KSHIM_API void kernel##__parameters(char* text, size_t size) { kshim::describe(kernel, text, size); }
