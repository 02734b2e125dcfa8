"""Bugs in kernels that the harness must find: what is replaced by what, which test runs, who finds it and how."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planted:
    """`old` stands once in `file`. `says` is a pattern in the output of who finds it."""

    name: str
    file: str
    old: str
    new: str
    test: str  # of tests/kernels, as for pytest; " -k EXPRESSION" may follow
    found_by: str = "plain"  # plain: the test fails, in one of the three orders; or asan, tsan
    says: str = ""  # for plain, empty: any assertion, error of the harness or signal


RACE = "ThreadSanitizer: data race"
SHARED = "global-buffer-overflow|insufficient space"  # ASan's words, or UBSan's where it sees the object
NORM = "test_norm.py::test_rms_norm -k 64"

PLANTED = [
    Planted(
        "norm: no barrier between partial sums and their sum",
        "norm.cu",
        "  __syncthreads();\n  return warp_sum(",
        "  return warp_sum(",
        NORM,
        "tsan",
        RACE,
    ),
    Planted(
        "norm: no barrier before the partial sums are used again",
        "norm.cu",
        "  __syncthreads();\n}\n\n// Where in the pool",
        "}\n\n// Where in the pool",
        "test_norm.py::test_pair -k 64",
        "tsan",
        RACE,
    ),
    Planted(
        "norm: no room for the sums of all warps",
        "norm.cu",
        "  __shared__ float shared[THREADS / 32];\n  const int r = rows",
        "  __shared__ float shared[THREADS / 64];\n  const int r = rows",
        NORM,
        "asan",
        SHARED,
    ),
    Planted(
        "norm: one vector behind the row",
        "norm.cu",
        "c < hidden; c += THREADS * 8) {\n    float v[8];\n    load8(from + c",
        "c <= hidden; c += THREADS * 8) {\n    float v[8];\n    load8(from + c",
        "test_norm.py::test_embed",
        "asan",
        "heap-buffer-overflow",
    ),
    Planted(
        "norm: vectors that are not aligned",
        "norm.cu",
        "keep_row(x + (i64)blockIdx.x * hidden,",
        "keep_row(x + (i64)blockIdx.x * hidden + 1,",
        "test_norm.py::test_embed",
        "asan",
        "misaligned address",
    ),
    Planted(
        "norm: a row that is read only is written to",
        "norm.cu",
        "const bool back = more && !rows;",
        "const bool back = more;",
        NORM,
    ),
    Planted(
        "norm: the end of a long row is left out of the sum",
        "norm.cu",
        "  for (int c = (threadIdx.x + KEPT * THREADS) * 8; c < hidden; c += THREADS * 8) {\n    float v[8], a[8];\n"
        "    load8(in + c, v);\n    if (more) {",
        "  for (int c = (threadIdx.x + KEPT * THREADS + 1) * 8; c < hidden; c += THREADS * 8) {\n    float v[8], a[8];\n"
        "    load8(in + c, v);\n    if (more) {",
        "test_norm.py::test_rms_norm -k 17416",
    ),
    Planted(
        "pair: a row is paired with itself",
        "norm.cu",
        "hidden_rows + (i64)(r - 1) * hidden",
        "hidden_rows + (i64)r * hidden",
        "test_norm.py::test_pair -k 64",
    ),
    Planted(
        "pair: what a sequence's block keeps is not read",
        "norm.cu",
        "if (r > row_begin[sequence]) {",
        "if (r > 0) {",
        "test_norm.py::test_pair -k 64",
    ),
    Planted(
        "hidden rows: the newest of a full block is not kept",
        "norm.cu",
        "position % BLOCK_CELLS != BLOCK_CELLS - 1) return;",
        "position % BLOCK_CELLS != BLOCK_CELLS) return;",
        "test_norm.py::test_keep_hidden -k 64",
    ),
    Planted(
        "hidden rows: of the first rejected draft instead of the last accepted",
        "norm.cu",
        "- 1 - drafts[s] + taken;",
        "- drafts[s] + taken;",
        "test_norm.py::test_keep_accepted",
    ),
    Planted(
        "cells: lanes read a head before all have written it",
        "cells.cu",
        "  __syncwarp();\n",
        "",
        "test_cells.py -k 64-64",
        "tsan",
        RACE,
    ),
    Planted(
        "cells: no room for the eighth warp's head",
        "cells.cu",
        "float shared[8 * D];",
        "float shared[7 * D];",
        "test_cells.py -k 128-128",
        "asan",
        SHARED,
    ),
    Planted(
        "cells: the whole head is rotated",
        "cells.cu",
        "else if (d < 2 * half)",
        "else",
        "test_cells.py -k 64-16",
    ),
    Planted(
        "cells: padding is written",
        "cells.cu",
        "if (position < 0 || head >=",
        "if (head >=",
        "test_cells.py -k 64-64",
    ),
    Planted(
        "cells: the block after at its border",
        "cells.cu",
        "table_stride + position / BLOCK_CELLS",
        "table_stride + (position + 1) / BLOCK_CELLS",
        "test_cells.py -k 64-64",
    ),
    Planted(
        "mlp: one vector too many",
        "mlp.cu",
        "i < all;",
        "i <= all;",
        "test_mlp.py",
        "asan",
        "heap-buffer-overflow",
    ),
]
