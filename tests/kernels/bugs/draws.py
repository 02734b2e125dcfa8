"""Bugs in cuda/sample.cu and image.cu."""

from tests.kernels.bugs.planted import RACE, SHARED, Planted

BUGS = [
    Planted(
        "sample: the best of the warps is read too early",
        "sample.cu",
        "    s->columns[warp] = b.column;\n  }\n  __syncthreads();\n",
        "    s->columns[warp] = b.column;\n  }\n",
        "test_sample.py::test_draws_equal_the_twin -k 97",
        "tsan",
        RACE,
    ),
    Planted(
        "sample: more keys are listed than there is room for",
        "sample.cu",
        "if (!listed && count <= LISTED) {",
        "if (!listed && count <= 2 * LISTED) {",
        "test_sample.py::test_draws_equal_the_twin -k 9001",
        "asan",
        SHARED,
    ),
    Planted(
        "sample: of equal logits the last wins",
        "sample.cu",
        "(s == score && c < column)",
        "(s == score && c > column)",
        "test_sample.py::test_extreme_settings",
    ),
    Planted(
        "sample: a place for sums is not cleared",
        "sample.cu",
        "    s->masses[draw.turn % 3] = 0;\n",
        "",
        "test_sample.py::test_draws_equal_the_twin -k 1025",
    ),
    Planted(
        "sample: who is far behind never wins",
        "sample.cu",
        "if (distance < FAR || hash >= least_hash)",
        "if (distance < FAR || (hash >= least_hash && false))",
        "test_sample.py::test_who_is_far_behind_can_win",
    ),
    Planted(
        "sample: the noise of another position",
        "sample.cu",
        "positions[row] + 1, id, column, &shared);",
        "positions[row], id, column, &shared);",
        "test_sample.py::test_noise_is_that_of_the_twin",
    ),
    Planted(
        "accept: a failed draw behind an accepted draft counts",
        "sample.cu",
        "agree && draws[agree] < 0 ? agree - 1 : agree;",
        "agree;",
        "test_sample.py::test_who_is_accepted",
    ),
    Planted(
        "checksum: no room for half of the warps",
        "image.cu",
        "u64 of_warp[8];",
        "u64 of_warp[4];",
        "test_image.py::test_parts_of_all_sizes",
        "asan",
        SHARED,
    ),
    Planted(
        "checksum: the warps are added before they are there",
        "image.cu",
        "of_warp[threadIdx.x / 32] = sum;\n  __syncthreads();\n",
        "of_warp[threadIdx.x / 32] = sum;\n",
        "test_image.py::test_parts_of_all_sizes",
        "tsan",
        RACE,
    ),
    Planted(
        "checksum: the last bytes are left out",
        "image.cu",
        "at + i < size; ++i)",
        "at + i < size - 1; ++i)",
        "test_image.py::test_parts_of_all_sizes",
    ),
]
