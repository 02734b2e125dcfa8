// The fake driver's memory: "device" memory is host memory between guard pages, page-locked memory is a list of ranges.
#pragma once
#include <map>

#include "streams.h"

constexpr size_t PAGE = 4096;
struct Range {
  size_t bytes;
  int card;  // -1: page-locked
};
using Ranges = std::map<uintptr_t, Range>;
inline Ranges device, pinned, registered;
inline std::vector<std::pair<char*, size_t>> given_back;  // poisoned, unmapped when no operation is pending

inline size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

inline bool inside(const Ranges& ranges, uintptr_t at, size_t bytes) {
  auto it = ranges.upper_bound(at);
  if (it == ranges.begin()) return false;
  --it;
  return at + bytes <= it->first + it->second.bytes;
}
inline bool overlaps(const Ranges& ranges, uintptr_t at, size_t bytes) {
  auto it = ranges.lower_bound(at + bytes);
  if (it == ranges.begin()) return false;
  --it;
  return it->first + it->second.bytes > at;
}
inline bool page_locked(const void* at, size_t bytes) {
  return inside(pinned, (uintptr_t)at, bytes) || inside(registered, (uintptr_t)at, bytes);
}
inline bool mapped(void* at, size_t bytes) {
  std::vector<unsigned char> resident(pages(bytes) / PAGE);
  return mincore(at, bytes, resident.data()) == 0;
}

// Fresh memory holds 0xFF bytes, NaN as a float and -1 as an int, unless it is asked for zeroed; what follows it always does.
inline int allocate(Card& card, size_t bytes, bool zeroed, void** at) {
  if (!bytes) return INVALID_VALUE;
  if (card.used + bytes > state.card_bytes) return OUT_OF_MEMORY;
  size_t all = pages(bytes);
  char* base = (char*)mmap(nullptr, all + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED || mprotect(base + PAGE, all, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
  char* start = base + PAGE;
  size_t from = zeroed ? bytes : 0;
  memset(start + from, 0xFF, all - from);
  device[(uintptr_t)start] = {bytes, card.index};
  card.used += bytes;
  count(counted::allocations);
  count(counted::allocated_bytes, bytes);
  *at = start;
  return OK;
}

// A write past the end of an allocation that stays within its last page.
inline void check_end(uintptr_t at, size_t bytes) {
  const unsigned char* p = (const unsigned char*)at;
  for (size_t i = bytes; i < pages(bytes); ++i)
    if (p[i] != 0xFF) {
      say("something wrote %zu bytes past the end of an allocation of %zu bytes", i - bytes + 1, bytes);
      count(counted::overruns);
      memset((void*)(at + bytes), 0xFF, pages(bytes) - bytes);
      return;
    }
}
inline void check_ends() {
  for (auto& [at, range] : device) check_end(at, range.bytes);
}

inline void unmap_given_back() {
  if (given_back.empty() || anything_pending()) return;
  for (auto& [at, bytes] : given_back) munmap(at, bytes);
  given_back.clear();
}

// Poisoned at once: an operation that still wants it reads NaN.
inline int give_back(uintptr_t at) {
  auto it = device.find(at);
  if (it == device.end()) return INVALID_VALUE;
  size_t bytes = it->second.bytes;
  check_end(at, bytes);
  state.cards[it->second.card].used -= bytes;
  if (anything_pending()) memset((void*)at, 0xFF, bytes);
  given_back.push_back({(char*)at - PAGE, pages(bytes) + 2 * PAGE});
  device.erase(it);
  count(counted::allocations, -1);
  count(counted::allocated_bytes, -(int64_t)bytes);
  unmap_given_back();
  return OK;
}

// The end of page-locked memory: no copy may be under way there, and it must still be mapped.
inline int release(Ranges& ranges, void* at, Counter number, Counter all, bool unmap) {
  auto it = ranges.find((uintptr_t)at);
  if (it == ranges.end()) return NOT_REGISTERED;
  size_t bytes = it->second.bytes;
  if (pending_use((uintptr_t)at, bytes)) {
    say("page-locked memory (%zu bytes) is released while a copy from or to it is under way", bytes);
    count(counted::early_releases);
    return UNKNOWN;
  }
  if (!mapped(at, bytes)) {
    say("page-locked memory (%zu bytes) was unmapped before it was released", bytes);
    count(counted::early_releases);
  }
  ranges.erase(it);
  count(number, -1);
  count(all, -(int64_t)bytes);
  if (unmap) munmap(at, pages(bytes));
  return OK;
}

// host: the side of the copy in host memory, null between two places on the card.
inline int copy_async(void* to, const void* from, size_t bytes, void* stream, const void* host) {
  if (state.sticky) return state.sticky;
  count(counted::copies);
  Stream* s = stream_of(stream);
  if (host && !page_locked(host, bytes)) {  // the driver falls back to a staged, blocking copy
    say("an asynchronous copy of %zu bytes from or to memory that is not page-locked", bytes);
    count(counted::unregistered_copies);
    NOT_IN_CAPTURE("a blocking copy");
    drain(s, s->put);
    memcpy(to, from, bytes);
    return OK;
  }
  Op op{[=] { memmove(to, from, bytes); }};
  if (host) op.host = (uintptr_t)host, op.host_bytes = bytes;
  return submit(s, std::move(op));
}
