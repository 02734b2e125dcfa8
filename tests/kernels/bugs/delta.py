"""Bugs in cuda/delta.cu and delta_rule.cu."""

from tests.kernels.bugs.planted import RACE, SHARED, Planted

RULE = "test_delta.py::test_rows_states_and_logs_are_the_twins"
REJECTED = "test_delta.py::test_rejected_drafts_leave_no_trace"

BUGS = [
    Planted(
        "delta: the shares of the warps are added before they are there",
        "delta_rule.cu",
        "      through_state<K>(t, s, mine, stop);\n      __syncthreads();\n",
        "      through_state<K>(t, s, mine, stop);\n",
        RULE,
        "tsan",
        RACE,
    ),
    Planted(
        "delta: a tile is loaded over one that is still folded",
        "delta_rule.cu",
        "    fold<K>(t, s);\n    __syncthreads();\n",
        "    fold<K>(t, s);\n",
        RULE,
        "tsan",
        RACE,
    ),
    Planted(
        "delta: copies nobody waits for",
        "delta_rule.cu",
        "  copies_wait<0>();\n",
        "",
        RULE,
    ),
    Planted(
        "delta: no room for the last row",
        "delta_rule.cu",
        "total[FOLD], since[FOLD], left[FOLD], beta[FOLD];",
        "total[FOLD], since[FOLD], left[FOLD], beta[FOLD - 4];",
        RULE,
        "asan",
        SHARED,
    ),
    Planted(
        "delta: a fold that drafts made due is left out",
        "delta_rule.cu",
        "const bool due = kept + FOLD == base;",
        "const bool due = false;",
        REJECTED,
    ),
    Planted(
        "delta: the state runs ahead of what is known",
        "delta_rule.cu",
        "min(known[sequence], last) / FOLD * FOLD);",
        "last / FOLD * FOLD);",
        REJECTED,
    ),
    Planted(
        "delta: entries of a fold are not decayed",
        "delta_rule.cu",
        "for (int c = 0; c < 4; ++c) d[c] *= t.left[j];",
        "",
        RULE,
    ),
    Planted(
        "delta: the convolution looks one row too far into the ring",
        "delta.cu",
        "(i64)((position - back) % conv_entries)",
        "(i64)((position - back + 1) % conv_entries)",
        RULE,
    ),
    Planted(
        "delta: the ring of inputs is read where the step has the row",
        "delta.cu",
        "if (back <= back_here)",
        "if (back < back_here)",
        RULE,
    ),
    Planted(
        "delta: of many rows the first are kept",
        "delta.cu",
        "for (int i = max(count - log_entries, 0); i < count; ++i)",
        "for (int i = min(count, log_entries) - 1; i >= 0; --i)",
        RULE,
    ),
]
