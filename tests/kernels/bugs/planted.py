"""What a planted bug is: what is replaced by what, which test runs, who finds it and how."""

from dataclasses import dataclass

RACE = "ThreadSanitizer: data race"
SHARED = "global-buffer-overflow|insufficient space|out of bounds"  # ASan's words, or UBSan's where it sees the object


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
