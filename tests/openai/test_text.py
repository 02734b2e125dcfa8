"""Text to tokens and back: both kinds of GGUF tokenizers, tokenizer.json, templates, and streams that equal their whole."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.text import MAX_PROMPT_CHARS, Detokenizer, Text, TextError
from tests.make_models import CHAT_TEMPLATE, VOCAB, tokenizer_json, write_gguf, write_hf
from wire.model_files import ModelError, find_model

STRINGS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces  and\ttabs\n\n\nlines \r\n",
    "def f(x):\n    return x ** 2  # é\n",
    "1234567890 3.14159 1,000 ½ Ⅷ ٣",
    "naïve café — “quotes” …",
    "日本語と中文字符 한국어 العربية हिन्दी",
    "🙂👨‍👩‍👧‍👦🏳️‍🌈",
    "e\u0301 \u200b \u00a0 \ufffd \U0010ffff",
    "don't I'LL we've 's",
]


@pytest.fixture(scope="module")
def smol() -> Text:
    return Text(find_model("smollm2"))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(find_model(str(write_spm(tmp_path_factory.mktemp("spm") / "spm.gguf"))))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(find_model(str(write_hf(tmp_path_factory.mktemp("hf") / "tiny"))))


def write_spm(path: Path, **metadata: Any) -> Path:
    """A GGUF file with a small SentencePiece vocabulary: bytes, pieces, one user-defined token."""
    pieces = [
        "▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "hell",
        "hello",
        "▁hello",
        "▁w",
        "or",
        "ld",
        "▁wor",
        "▁world",
        "▁▁",
    ]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "<mark>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    return write_gguf(path, metadata=values | metadata)


def with_template(text: Text, template: str | None) -> Text:
    """The same tokenizer with another chat template."""
    return Text(msgspec.structs.replace(text._files, chat_template=template))


# encoding and decoding ------------------------------------------------------------------------------------------------
def test_known_ids_of_the_embedded_model(smol: Text) -> None:
    assert smol.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert smol.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert smol.encode("\n\n½") == [1116, 16738]  # digits of every script stand alone before lines are split
    assert smol.encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]
    assert smol.vocab_size == 49152


@pytest.mark.parametrize("text", STRINGS)
def test_round_trip(smol: Text, spm: Text, tiny: Text, text: str) -> None:
    for model in (smol, spm, tiny):
        assert model.decode(model.encode(text, add_special=False)) == text


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=40))  # no text of a special token
def test_any_text_round_trips(spm: Text, tiny: Text, text: str) -> None:
    assert tiny.decode(tiny.encode(text)) == text
    assert spm.decode(spm.encode(text)) == text.replace("▁", " ")


def test_scores_decide_what_merges(spm: Text) -> None:
    words = [spm.token_text(i) for i in spm.encode("hello world")]
    assert words == ["<s>", " hello", " world"]
    assert [spm.token_text(i) for i in spm.encode("hellworld", add_special=False)] == [" ", "hell", "w", "or", "ld"]
    ids = spm.encode("<mark>hello é", add_special=False)
    assert [spm.token_bytes(i) for i in ids] == [b"<mark>", b" hello", b" ", b"\xc3", b"\xa9"]
    assert spm.decode(ids) == "<mark> hello é"


def test_without_space_prefix(tmp_path: Path) -> None:
    text = Text(find_model(str(write_spm(tmp_path / "m.gguf", **{"tokenizer.ggml.add_space_prefix": False}))))
    assert [text.token_text(i) for i in text.encode("hello", add_special=False)] == ["hello"]
    assert text.decode(text.encode(" hello")) == " hello"


def test_special_tokens_are_shown_when_asked(smol: Text) -> None:
    ids = smol.encode("<|im_start|>hi<|im_end|>")
    assert smol.decode(ids) == "hi"
    assert smol.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert smol.is_special(2)
    assert not smol.is_special(300)
    assert smol.token_text(2) == "<|im_end|>"


def test_json_and_gguf_make_the_same_tokens(tiny: Text, tmp_path: Path) -> None:
    gguf = Text(find_model(str(write_gguf(tmp_path / "m.gguf"))))
    for text in STRINGS:
        assert gguf.encode(text) == tiny.encode(text)
    assert [gguf.token_bytes(i) for i in range(VOCAB)] == [tiny.token_bytes(i) for i in range(VOCAB)]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "default", "dbrx"])
def test_every_split_keeps_the_text(tmp_path: Path, pre: str) -> None:
    text = Text(find_model(str(write_gguf(tmp_path / "m.gguf", pre=pre))))
    for string in STRINGS:
        found = text.decode(text.encode(string, add_special=False))
        assert found == (string if pre[:4] != "qwen" else string.replace("e\u0301", "é"))


def test_splits_differ_where_they_should(tmp_path: Path) -> None:
    def words(pre: str, string: str) -> list[str]:
        splitter = Text(find_model(str(write_gguf(tmp_path / f"{pre}.gguf", pre=pre))))._tokenizer.pre_tokenizer
        return [word.replace("Ġ", "_") for word, _ in splitter.pre_tokenize_str(string)]

    assert words("gpt-2", "it's 12345 ok") == ["it", "'s", "_12345", "_ok"]
    assert words("smollm", "it's 12345 ok") == ["it", "'s", "_", "1", "2", "3", "4", "5", "_ok"]
    assert words("llama-bpe", "IT'S 12345 ok") == ["IT", "'S", "_", "123", "45", "_ok"]
    assert words("qwen2", "it's 123 ok") == ["it", "'s", "_", "1", "2", "3", "_ok"]


def test_beginning_token(tmp_path: Path, spm: Text) -> None:
    bos = Text(find_model(str(write_hf(tmp_path / "a", bos=True))))
    assert bos.encode("hi")[0] == 1
    assert bos.encode("hi", add_special=False)[0] != 1
    by_setting = Text(find_model(str(write_hf(tmp_path / "b", tokenizer_config={"add_bos_token": True}))))
    assert by_setting.encode("hi") == bos.encode("hi")
    against = Text(find_model(str(write_hf(tmp_path / "c", bos=True, tokenizer_config={"add_bos_token": False}))))
    assert against.encode("hi") == bos.encode("hi")[1:]
    assert spm.encode("hi")[0] == 1


def test_a_lone_surrogate_is_a_text_error(smol: Text) -> None:
    with pytest.raises(TextError, match=r"character 3 .*U\+D83D"):
        smol.encode("abc\ud83d")


@pytest.mark.parametrize("token", [-1, 49152, 10**30])
def test_ids_outside_the_vocabulary(smol: Text, token: int) -> None:
    with pytest.raises(TextError, match="not in the vocabulary"):
        smol.decode([token])
    assert smol.token_bytes(token) == b""


def test_padding_rows_have_no_text(tmp_path: Path) -> None:
    text = Text(find_model(str(write_hf(tmp_path / "m", vocab=VOCAB + 10))))
    assert text.vocab_size == VOCAB + 10
    assert text.decode([VOCAB + 3]) == ""
    assert Detokenizer(text).push([VOCAB + 3]) == ""


def test_a_token_without_a_row_is_refused(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m")
    data = tokenizer_json()
    data["added_tokens"].append(data["added_tokens"][0] | {"id": VOCAB, "content": "[PAD]"})
    (path / "tokenizer.json").write_text(json.dumps(data))
    text = Text(find_model(str(path)))
    assert text.encode("hi")
    with pytest.raises(TextError, match=r"\[PAD\]"):
        text.encode("hi[PAD]")


def test_a_tokenizer_that_cannot_be_built_is_one_line(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer_json() | {"model": {"type": "Unheard"}}))
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Text(find_model(str(path)))
    with pytest.raises(ModelError, match="cannot be built"):
        Text(find_model(str(write_gguf(tmp_path / "m.gguf", metadata={"tokenizer.ggml.merges": ["zz qq"]}))))


# streams --------------------------------------------------------------------------------------------------------------
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_pieces_equal_the_whole(smol: Text, spm: Text, tiny: Text, data: st.DataObject) -> None:
    text = data.draw(st.sampled_from([smol, spm, tiny]))
    skip = data.draw(st.booleans())
    ids = data.draw(
        st.lists(st.integers(0, text.vocab_size - 1) | st.integers(0, 300).map(lambda i: i % text.vocab_size), max_size=24)
    )
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6).map(sorted))
    stream = Detokenizer(text, skip_special=skip)
    edges = [0, *cuts, len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert "".join(pieces) + stream.finish() == text.decode(ids, skip_special=skip)


def test_every_split_of_one_text(smol: Text) -> None:
    ids = smol.encode("🙂 naïve 日本語 👨‍👩‍👧‍👦")
    for cut in range(len(ids) + 1):
        stream = Detokenizer(smol)
        first, second = stream.push(ids[:cut]), stream.push(ids[cut:])
        assert "\ufffd" not in first + second
        assert first + second + stream.finish() == "🙂 naïve 日本語 👨‍👩‍👧‍👦"


def test_incomplete_characters_wait_and_end_as_one_mark(smol: Text) -> None:
    ids = smol.encode("日本語")
    partial = [i for i in ids if len(smol.token_bytes(i)) < 3]
    assert partial, "a token that is part of a character"
    stream = Detokenizer(smol)
    cut = ids.index(partial[0]) + 1
    shown = stream.push(ids[:cut])
    assert "\ufffd" not in shown
    assert stream.finish() == "\ufffd"


def test_a_stream_behind_a_prompt_keeps_its_space(spm: Text) -> None:
    ids = spm.encode("hello world", add_special=False)
    assert Detokenizer(spm).push(ids) == "hello world"
    assert Detokenizer(spm, continues=True).push(ids[1:]) == " world"


def test_a_token_costs_the_same_at_the_end_of_a_long_stream(smol: Text) -> None:
    class Counted(Text):
        joined = 0

        def __init__(self) -> None:
            vars(self).update(vars(smol))

        def join(self, ids: Any, skip_special: bool = True) -> bytes:
            Counted.joined += len(ids)
            return super().join(ids, skip_special)

    stream = Detokenizer(Counted())
    for i in range(2000):
        stream.push([300 + i % 50])
    assert Counted.joined == 2000


# chat templates -------------------------------------------------------------------------------------------------------
def test_the_embedded_template(smol: Text) -> None:
    messages = [{"role": "user", "content": "hi"}]
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smol.chat_text(messages) == expected
    assert smol.decode(smol.chat_prompt(messages), skip_special=False) == expected
    assert smol.chat_text(messages, add_generation_prompt=False) == expected.removesuffix("<|im_start|>assistant\n")
    assert messages == [{"role": "user", "content": "hi"}]


def test_without_a_template(tiny: Text) -> None:
    text = with_template(tiny, None)
    assert not text.has_chat_template
    assert tiny.has_chat_template
    with pytest.raises(TextError, match="no chat template"):
        text.chat_prompt([])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "é<&"}]'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ bos_token }}|{{ eos_token }}|{{ tools }}|{{ missing }}", "<|im_start|>|<|im_end|>|None|"),
        ("{% generation %}a{{ messages[0].content }}{% endgeneration %}b", "aé<&b"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ messages[0]['content'].strip().split('<')[0] }}", "é"),
        ("{{ thinking }}", "True"),
    ],
)
def test_what_templates_may_use(tiny: Text, template: str, expected: str) -> None:
    assert with_template(tiny, template).chat_text([{"role": "user", "content": "é<&"}], thinking=True) == expected


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('only\nusers') }}", "only users"),
        ("{% if %}", "chat template"),
        ("{{ messages[0].content + 1 }}", "chat template"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{% include 'x' %}", "chat template"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 'x' * 99999999999 }}", "more than"),
        ("{{ 2 ** 99999999999 }}", "powers"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endfor %}", "more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
        ("{{ range(999999999) | list }}", "chat template"),
    ],
)
def test_what_a_template_does_wrong_is_one_line(tiny: Text, template: str, words: str) -> None:
    with pytest.raises(TextError) as caught:
        with_template(tiny, template).chat_prompt([{"role": "user", "content": "x"}])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "messages", [[{}], [1], [None], ["x"], [{"role": 1, "content": None}], [{"role": "user", "content": ["x"]}]]
)
def test_messages_that_a_template_did_not_expect(smol: Text, messages: list[Any]) -> None:
    with pytest.raises(TextError):
        smol.chat_prompt(messages)


def test_exactly_one_beginning_token(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}]

    def first(path: Path) -> list[int]:
        return Text(find_model(str(path))).chat_prompt(messages)[:2]

    plain = "{{ messages[0].content }}"
    for template in (plain, "{{ bos_token }}" + plain):
        files = write_spm(tmp_path / "m.gguf", **{"tokenizer.chat_template": template})
        assert first(files).count(1) == 1
    with_bos = write_hf(tmp_path / "m", bos=True, chat_template="{{ bos_token }}" + plain)
    assert first(with_bos).count(1) == 1
    assert CHAT_TEMPLATE.count("bos_token") == 0


def test_bound_of_a_prompt(tiny: Text) -> None:
    text = with_template(tiny, "{% for m in messages %}{{ m.content }}{% endfor %}")
    half = "x" * (MAX_PROMPT_CHARS // 2)
    assert len(text.chat_text([{"content": half}, {"content": half}])) == MAX_PROMPT_CHARS
    with pytest.raises(TextError, match="more than"):
        text.chat_text([{"content": half}, {"content": half}, {"content": "x"}])


def test_random_ids_never_fail(smol: Text) -> None:
    rng = random.Random(5)
    for _ in range(200):
        ids = [rng.randrange(49152) for _ in range(30)]
        assert isinstance(smol.decode(ids), str)
        smol.encode(smol.decode(ids))
