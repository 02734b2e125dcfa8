"""Bugs in kernels that the harness must find."""

from tests.kernels.bugs import attention, delta, draws, rows

PLANTED = rows.BUGS + attention.BUGS + delta.BUGS + draws.BUGS
