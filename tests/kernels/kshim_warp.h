// Collectives of a warp on the CPU: a lane that arrives waits, the last of the mask computes the results of all.
#pragma once

namespace kshim {

struct Mma {
  const unsigned *a, *b;
  float* c;
};
struct LdMatrix {
  unsigned short row[8];
  unsigned* r;
  bool transposed;
};

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 with the fragments of the PTX manual, see cuda/common.cuh.
KSHIM_INTERNAL inline void resolve_mma(unsigned warp) {
  float a[16][16], b[16][8];
  auto half = [](unsigned r, int high) {
    uint32_t u = high ? (r & 0xffff0000u) : (r << 16);
    float f;
    memcpy(&f, &u, 4);
    return f;
  };
  for (unsigned l = 0; l < 32; ++l) {
    auto* m = (Mma*)fiber_of(warp, l)->payload;
    unsigned group = l >> 2, t = l & 3;
    for (int r = 0; r < 4; ++r)
      for (int h = 0; h < 2; ++h) a[group + (r & 1) * 8][t * 2 + h + (r >> 1) * 8] = half(m->a[r], h);
    for (int r = 0; r < 2; ++r)
      for (int h = 0; h < 2; ++h) b[t * 2 + h + r * 8][group] = half(m->b[r], h);
  }
  for (unsigned l = 0; l < 32; ++l) {
    auto* m = (Mma*)fiber_of(warp, l)->payload;
    unsigned group = l >> 2, t = l & 3;
    for (int r = 0; r < 4; ++r) {
      float s = m->c[r];
      for (int k = 0; k < 16; ++k) s += a[group + (r >> 1) * 8][k] * b[k][t * 2 + (r & 1)];
      m->c[r] = s;
    }
  }
}

KSHIM_INTERNAL inline void resolve_ldmatrix(unsigned warp) {
  for (unsigned l = 0; l < 32; ++l) {
    auto* mine = (LdMatrix*)fiber_of(warp, l)->payload;
    for (unsigned i = 0; i < 4; ++i) {
      unsigned word = 0;
      for (unsigned h = 0; h < 2; ++h) {
        unsigned row = mine->transposed ? 2 * (l & 3) + h : l >> 2, column = mine->transposed ? l >> 2 : 2 * (l & 3) + h;
        word |= (unsigned)((LdMatrix*)fiber_of(warp, i * 8 + row)->payload)->row[column] << (16 * h);
      }
      mine->r[i] = word;
    }
  }
}

enum Reduction : int { ADD, MIN, MAX, AND, OR, XOR };
inline unsigned reduce_two(int kind, unsigned a, unsigned b) {
  switch (kind) {
    case ADD: return a + b;
    case MIN: return a < b ? a : b;
    case MAX: return a > b ? a : b;
    case AND: return a & b;
    case OR: return a | b;
    default: return a ^ b;
  }
}

// Every lane that arrives calls this; the last of the mask computes the results of all.
KSHIM_INTERNAL inline void try_release(unsigned warp, unsigned mask) {
  Fiber* first = nullptr;
  uint64_t ballot = 0;
  unsigned reduced = 0;
  for (unsigned l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    Fiber* f = fiber_of(warp, l);
    if (!f || f->state == DONE)
      return fail("warp %u: lane %u is in the mask %08x of a warp collective but has exited or does not exist", warp, l, mask);
    if (f->state != AT_COLLECTIVE || f->mask != mask) return;
    if (first && f->op != first->op)
      return fail("warp %u: lanes of mask %08x wait at different collectives (lane %u)", warp, mask, l);
    reduced = first ? reduce_two(f->argument, reduced, (unsigned)f->value) : (unsigned)f->value;
    if (!first) first = f;
    ballot |= (uint64_t)(f->value != 0) << l;
  }
  if (first->op == OP_MMA || first->op == OP_LDMATRIX) {
    if (mask != 0xffffffffu) return fail("warp %u: mma.sync or ldmatrix without all 32 lanes", warp);
    first->op == OP_MMA ? resolve_mma(warp) : resolve_ldmatrix(warp);
  }
  for (unsigned l = 0; l < 32; ++l) {
    if (!(mask >> l & 1)) continue;
    Fiber* f = fiber_of(warp, l);
    if (f->op == OP_SHUFFLE) {
      if (!(mask >> f->argument & 1))
        return fail("warp %u: lane %u shuffles from lane %u, which is not in the mask", warp, l, f->argument);
      f->result = fiber_of(warp, f->argument)->value;
    } else {
      f->result = f->op == OP_REDUCE ? reduced : ballot;
    }
  }
  for (unsigned l = 0; l < 32; ++l)
    if (mask >> l & 1) fiber_of(warp, l)->state = READY;
}

// Only __syncwarp orders memory, as in CUDA: a shuffle, a vote or a product makes no write of one lane seen by another.
KSHIM_INTERNAL inline uint64_t collective(Op op, unsigned mask, uint64_t value, int argument, void* payload = nullptr) {
  Fiber* f = g.current;
  if (!(mask >> f->lane & 1))
    stop("lane %u of warp %u calls a warp collective whose mask %08x leaves it out", f->lane, f->warp, mask);
  f->op = op;
  f->mask = mask;
  f->value = value;
  f->argument = argument;
  f->payload = payload;
  f->state = AT_COLLECTIVE;
#ifdef KSHIM_TSAN
  if (op == OP_SYNC) __tsan_release(&g.warp_tags[f->warp]);
#endif
  try_release(f->warp, mask);
  to_scheduler(f);
#ifdef KSHIM_TSAN
  if (op == OP_SYNC) __tsan_acquire(&g.warp_tags[f->warp]);
#endif
  return f->result;
}
}  // namespace kshim
