"""Traces: a file and back, and one clear line for whatever is wrong with it."""

import pytest

from sim.trace import Request, TraceError, parse, read, write

A = b'{"id": "a", "prompt_tokens": 20, "output_tokens": 10}'
B = b'{"id": "b", "prompt_tokens": 40, "output_tokens": 10, "after": "a", "think_s": 1.5, "priority": -2}'


def test_lines_become_requests():
    assert parse([A, b"", B]) == [Request("a", 20, 10), Request("b", 40, 10, after="a", think_s=1.5, priority=-2)]


def test_who_comes_after_may_stand_before():
    assert [request.id for request in parse([B, A])] == ["b", "a"]


def test_a_trace_survives_its_file(tmp_path):
    path = str(tmp_path / "t.jsonl")
    trace = parse([A, B])
    write(path, trace)
    assert read(path) == trace
    assert "priority" not in (tmp_path / "t.jsonl").read_text().splitlines()[0], "what is not said is not written"


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([], "line 1: no request"),
        ([A, b"{"], "line 2: "),
        ([A, b'{"id": "b", "prompt_tokens": 0, "output_tokens": 1}'], "line 2: .*>= 1.*prompt_tokens"),
        ([A, b'{"id": "b", "prompt_tokens": 1, "output_tokens": 1, "piority": 1}'], "line 2: .*piority"),
        ([A, b'{"id": "b", "prompt_tokens": 1, "output_tokens": 1, "priority": 101}'], "line 2: .*<= 100.*priority"),
        ([A, b'{"id": "b", "prompt_tokens": 1}'], "line 2: .*output_tokens"),
        ([A, b"\xff\xfe"], "line 2: "),
        ([A, b"", A], "line 3: the id 'a' is that of line 1 already"),
        ([B], "line 1: 'b' comes after 'a', which is not in the trace"),
        ([A, B.replace(b"40", b"30")], "line 2: 'b' comes after 'a' and includes its 30 tokens and one .* has 30 prompt_tokens"),
        ([A.replace(b"}", b', "after": "a"}')], "line 1: 'a' comes after 'a' and includes its 30 tokens"),
        ([A.replace(b"}", b', "after": "b"}'), B], "line 1: 'a' comes after 'b' and includes its 50 tokens"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(lines, error):
    with pytest.raises(TraceError, match=error) as caught:
        parse(lines)
    assert "\n" not in str(caught.value)


def test_the_file_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    with pytest.raises(TraceError, match=f"{path}: No such file"):
        read(str(path))
    path.write_bytes(A + b"\n" + b"{")
    with pytest.raises(TraceError, match=f"{path}, line 2: "):
        read(str(path))
    with pytest.raises(TraceError, match="Is a directory"):
        write(str(tmp_path), parse([A]))


def test_a_long_chain_is_read_in_no_time():
    """Each link is looked at once, in whatever order the lines stand."""
    chain = [Request(f"r{number}", 2 * number + 1, 1, after=f"r{number - 1}" if number else "") for number in range(20_000)]
    import msgspec

    assert len(parse(map(msgspec.json.encode, reversed(chain)))) == 20_000
