"""What a tokenizer is made from, taken from a model's files and checked; building one is the business of router.openai.text."""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from wire.gguf_file import GgufFile
from wire.model_spec import ModelError, one_line

CONTROL, USER_DEFINED, UNKNOWN, BYTE = 3, 4, 2, 6  # values of tokenizer.ggml.token_type; 1 is a normal token, 5 an unused one


class PreTokenizer(Struct, frozen=True):
    """How text is split before byte-pair merges: `splits` one after another, then GPT-2's own pattern if `gpt2` is set."""

    splits: tuple[str, ...] = ()
    gpt2: bool = False
    digits: bool = False  # every digit alone, before GPT-2's pattern
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is a token is that token, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise


_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT2 = PreTokenizer(gpt2=True)
_DIGITS = PreTokenizer(gpt2=True, digits=True)
_LLAMA3 = PreTokenizer(splits=(_LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
_LLAMA3_MERGED = PreTokenizer(splits=(_LLAMA3_SPLIT,))
_QWEN2 = PreTokenizer(splits=(_QWEN2_SPLIT,), nfc=True)

# tokenizer.ggml.pre is only a name; the patterns are those of the tokenizer.json files that the names stand for
PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "mpt": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _LLAMA3_MERGED,
    "smaug-bpe": _LLAMA3_MERGED,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer(splits=(_QWEN2_SPLIT,)),
    "qwen35": PreTokenizer(splits=(_QWEN35_SPLIT,), nfc=True),
    "tekken": PreTokenizer(splits=(_TEKKEN_SPLIT,), ignore_merges=True, add_bos=True),
    "default": PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


class TokenizerData(Struct, frozen=True):
    """Everything that a tokenizer needs. kind "json": `json` is a tokenizer.json; "bpe" (byte-level) and "spm"
    (SentencePiece's byte-pair merges by score) come from GGUF and use the other fields.

    `post_process`: what is added around a text is the business of tokenizer.json's post-processor; if not, `add_bos` and
    `add_eos` say it. `byte_level`: the letters of a token stand for bytes (GPT-2's alphabet); if not, the token is text in
    which U+2581 stands for a space. `byte_tokens`: tokens <0x00> to <0xFF> are bytes. `strip_space`: a text's first space
    is the tokenizer's own and not shown.
    """

    kind: Literal["json", "bpe", "spm"]
    file: str  # for messages
    json: bytes = b""
    pre: PreTokenizer = PreTokenizer()
    tokens: list[str] = []
    merges: list[str] = []
    scores: list[float] = []
    token_types: list[int] = []
    bos_id: int | None = None
    eos_id: int | None = None
    unk_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False
    post_process: bool = False
    byte_level: bool = True
    byte_tokens: bool = False
    strip_space: bool = False

    @property
    def control_ids(self) -> dict[str, int]:
        """Text -> id of the tokens that are no text of their own (GGUF kinds only)."""
        return {self.tokens[i]: i for i, kind in enumerate(self.token_types) if kind == CONTROL}


def gguf_tokenizer(file: GgufFile) -> TokenizerData:
    """The tokenizer in a GGUF file's metadata; ModelError for a kind or a pre-tokenizer that is not known."""

    def get(key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        return file.get(f"tokenizer.ggml.{key}", kind, default)

    model = get("model", str)
    if model not in ("gpt2", "llama"):
        raise ModelError(f"{file.path}: unknown tokenizer {model!r} (known: gpt2, llama)")
    tokens = _strings(file, "tokens")
    types = get("token_type", list, [1] * len(tokens))
    if len(types) != len(tokens) or not all(isinstance(t, int) for t in types):
        raise ModelError(f"{file.path}: tokenizer.ggml.token_type does not match the {len(tokens)} tokens")
    common = {
        "file": file.path,
        "tokens": tokens,
        "token_types": types,
        "bos_id": _token_id(file, "bos_token_id", len(tokens)),
        "eos_id": _token_id(file, "eos_token_id", len(tokens)),
        "unk_id": _token_id(file, "unknown_token_id", len(tokens)),
        "add_eos": get("add_eos_token", bool, False),
    }
    if model == "llama":
        scores = get("scores", list)
        if len(scores) != len(tokens) or not all(isinstance(s, (int, float)) for s in scores):
            raise ModelError(f"{file.path}: tokenizer.ggml.scores does not match the {len(tokens)} tokens")
        add_bos, prefix = get("add_bos_token", bool, True), get("add_space_prefix", bool, True)
        form = {"add_space_prefix": prefix, "strip_space": prefix, "byte_level": False, "byte_tokens": True}
        return TokenizerData(kind="spm", scores=scores, add_bos=add_bos, **form, **common)
    name = get("pre", str)
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise ModelError(f"{file.path}: unknown pre-tokenizer {name!r} (known: {', '.join(PRE_TOKENIZERS)})")
    merges = _strings(file, "merges")
    return TokenizerData(kind="bpe", pre=pre, merges=merges, add_bos=get("add_bos_token", bool, pre.add_bos), **common)


class _Token(Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerJson(Struct):
    """The parts of a tokenizer.json that are looked at here; the vocabulary is skipped."""

    model: msgspec.Raw
    added_tokens: list[_Token] = []
    post_processor: Any = None
    decoder: Any = None


def json_tokenizer(
    path: str, data: bytes, bos: str = "", eos: str = "", add_bos: bool | None = None, add_eos: bool | None = None
) -> tuple[TokenizerData, dict[str, int]]:
    """A tokenizer.json as it is, and text -> id of its special tokens; ModelError if it cannot be parsed.

    `add_bos` and `add_eos` are the settings of tokenizer_config.json; None leaves the matter to the post-processor.
    """
    try:
        parsed = msgspec.json.decode(data, type=_TokenizerJson)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: {one_line(error)}") from None
    special = {t.content: t.id for t in parsed.added_tokens if t.special}
    added = {t.content: t.id for t in parsed.added_tokens}
    bos_id, eos_id = added.get(bos), added.get(eos)
    post_process = add_bos is None and add_eos is None and parsed.post_processor is not None
    found = TokenizerData(
        kind="json",
        file=path,
        json=data,
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=_begins_with(parsed.post_processor, bos) if post_process else bool(add_bos) and bos_id is not None,
        add_eos=bool(add_eos) and eos_id is not None,
        post_process=post_process,
        **_text_form(path, parsed.decoder),
    )
    return found, special


def _text_form(path: str, decoder: Any) -> dict[str, bool]:
    """How tokens become text, from tokenizer.json's decoder; ModelError for a decoder of another family."""
    parts = decoder["decoders"] if isinstance(decoder, dict) and isinstance(decoder.get("decoders"), list) else [decoder]
    byte_level = byte_tokens = strip = spaces = False
    for part in parts:
        match part:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "ByteFallback"}:
                byte_tokens = True
            case {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}:
                spaces = True
            case {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme}:
                spaces, strip = True, scheme != "never"
            case {"type": "Metaspace", "replacement": "\u2581"}:
                spaces, strip = True, part.get("add_prefix_space") is not False
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                strip = True
            case {"type": "Fuse"}:
                pass
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                raise ModelError(f"{path}: the decoder {one_line(repr(kind))} is not supported")
    if byte_level == spaces:
        raise ModelError(f"{path}: the decoder is neither byte-level nor one of SentencePiece's")
    return {"byte_level": byte_level, "byte_tokens": byte_tokens, "strip_space": strip}


def _begins_with(post_processor: Any, bos: str) -> bool:
    """Whether a post-processor, or one in its sequence, puts `bos` before a text."""
    match post_processor:
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": first}}, *_]}:
            return bool(bos) and first == bos
        case {"type": "Sequence", "processors": list(parts)}:
            return any(_begins_with(part, bos) for part in parts)
        case _:
            return False


def _strings(file: GgufFile, key: str) -> list[str]:
    found = file.get(f"tokenizer.ggml.{key}", list)
    if not all(isinstance(s, str) for s in found):
        raise ModelError(f"{file.path}: tokenizer.ggml.{key} is no list of strings")
    return found


def _token_id(file: GgufFile, key: str, count: int) -> int | None:
    found = file.get(f"tokenizer.ggml.{key}", int, None)
    if found is None or found == 2**32 - 1:  # -1: none
        return None
    if not 0 <= found < count:
        raise ModelError(f"{file.path}: tokenizer.ggml.{key} {found} is no id of the {count} tokens")
    return found
