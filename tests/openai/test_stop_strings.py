"""Stop strings against a naive oracle: the result depends on the text only, never on how it was cut."""

from hypothesis import given
from hypothesis import strategies as st

from router.openai.stop_strings import StopStrings

LETTERS = "ab\n"


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def could_begin(tail: str, stops: list[str]) -> bool:
    return any(len(tail) < len(stop) and stop.startswith(tail) for stop in stops)


@given(
    st.text(LETTERS, max_size=60),
    st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=0, max_size=5),
    st.lists(st.integers(0, 60), max_size=30),
    st.booleans(),
)
def test_equals_the_oracle_however_the_text_is_cut(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopStrings(stops, include)
    shown = ""
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    for start, end in zip(borders, borders[1:]):
        shown += matcher.push(text[start:end])
        if matcher.matched is None:
            held = text[len(shown) : end]
            assert text[:end] == shown + held
            assert held == "" or could_begin(held, stops)
            longer = [text[i:end] for i in range(len(shown))]
            assert not any(could_begin(tail, stops) for tail in longer), "shown text that could begin a stop string"
    shown += matcher.finish()
    assert (shown, matcher.matched) == oracle(text, stops, include)


def test_text_comes_out_at_once_where_no_stop_string_can_begin() -> None:
    matcher = StopStrings(["END"])
    assert matcher.push("hello") == "hello"
    assert matcher.push(" E") == " "
    assert matcher.push("N") == ""
    assert matcher.push("E") == "EN"
    assert matcher.push("NDx") == ""
    assert matcher.matched == "END"
    assert matcher.finish() == ""
