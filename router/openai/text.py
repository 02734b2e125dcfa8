"""Text to tokens and back: tokenizers from tokenizer.json or GGUF metadata, chat templates, text of a growing stream."""

import codecs
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from wire.model_files import ModelError, ModelFiles, TokenizerData
from wire.model_spec import one_line
from wire.tokenizer_data import CONTROL, UNKNOWN, USER_DEFINED, PreTokenizer

MAX_PROMPT_CHARS = 2**26  # what a chat template may write: twice the largest body

_SPACE = "\u2581"  # SentencePiece's letter for a space
_REPLACEMENT = "utf-8", "replace"


class TextError(ValueError):
    """Text, tokens or messages that cannot be used; one line for the client."""


def byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: letter -> byte. Printable Latin-1 characters stand for themselves, other bytes for U+0100 and on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def build_tokenizer(data: TokenizerData) -> Tokenizer:
    """The tokenizer that `data` describes; ModelError if the library refuses it."""
    try:
        match data.kind:
            case "json":
                tokenizer = Tokenizer.from_buffer(data.json)
            case "bpe":
                tokenizer = _byte_level(data)
            case "spm":
                tokenizer = _sentence_piece(data)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for every defect of its input
        raise ModelError(f"{data.file}: the tokenizer cannot be built: {one_line(error)}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _byte_level(data: TokenizerData) -> Tokenizer:
    """GPT-2's kind of byte-pair merges."""
    merges = [tuple(merge.split(" ")) for merge in data.merges]
    tokenizer = Tokenizer(models.BPE(_vocabulary(data), merges, ignore_merges=data.pre.ignore_merges))
    if data.pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_splitters(data.pre))
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, data)
    return tokenizer


def _splitters(pre: PreTokenizer) -> list[Any]:
    splitters: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.splits]
    if pre.digits:
        splitters.append(pre_tokenizers.Digits(individual_digits=True))
    return [*splitters, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2)]


def _sentence_piece(data: TokenizerData) -> Tokenizer:
    """SentencePiece's byte-pair kind: of all neighbours, those that make the piece with the best score merge first."""
    vocabulary = _vocabulary(data)
    merges = []
    for piece, i in vocabulary.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [
            (-data.scores[i], i, cut, pair) for cut, pair in enumerate(pairs) if pair[0] in vocabulary and pair[1] in vocabulary
        ]
    merges.sort()
    unknown = None if data.unk_id is None else data.tokens[data.unk_id]
    ordered = [pair for *_, pair in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary, ordered, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if data.add_space_prefix else spaces
    _add_tokens(tokenizer, data)
    return tokenizer


def _vocabulary(data: TokenizerData) -> dict[str, int]:
    """Text -> id; of tokens with the same text the first counts."""
    found: dict[str, int] = {}
    for i, token in enumerate(data.tokens):
        found.setdefault(token, i)
    return found


def _add_tokens(tokenizer: Tokenizer, data: TokenizerData) -> None:
    """Control and user-defined tokens are found in a text before anything is split or normalised."""
    kinds = (CONTROL, USER_DEFINED)
    added = [(t, kind == CONTROL) for t, kind in zip(data.tokens, data.token_types, strict=True) if t and kind in kinds]
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t, special in added])


class Text:
    """A model's tokenizer and chat template; ModelError if its tokenizer cannot be built.

    `vocab_size` is the model's: ids beyond the tokenizer's are padding without text.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._data = files.tokenizer
        self._tokenizer = build_tokenizer(files.tokenizer)
        self._bytes, self._special = _token_table(self._tokenizer, files.tokenizer, files.spec.vocab)
        self._template: jinja2.Template | None = None
        self.vocab_size = files.spec.vocab
        self.has_chat_template = files.chat_template is not None
        self.strips_space = files.tokenizer.strip_space

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text. Special tokens written in it become their ids; `add_special` adds what the model wants around
        a text (such as a beginning token). TextError for a text that is no valid Unicode."""
        data = self._data
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TextError(f"character {error.start} of the text is a lone surrogate (U+{ord(text[error.start]):04X})") from None
        ids = self._tokenizer.encode(text, add_special_tokens=add_special and data.post_process).ids
        if add_special and not data.post_process:
            before = [data.bos_id] if data.add_bos and data.bos_id is not None else []
            after = [data.eos_id] if data.add_eos and data.eos_id is not None else []
            ids = before + ids + after
        if len(self._bytes) > self.vocab_size and max(ids, default=0) >= self.vocab_size:
            raise TextError(f"token {self.token_text(max(ids))!r} of the tokenizer has no row in the model")
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of token ids, bytes that are no UTF-8 as U+FFFD. TextError for an id outside the vocabulary."""
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise TextError(f"token id {i} is not in the vocabulary of {self.vocab_size}")
        return self._shown(self.join(ids, skip_special).decode(*_REPLACEMENT))

    def join(self, ids: Sequence[int], skip_special: bool = True) -> bytes:
        """The bytes of tokens one after another."""
        table, special = self._bytes, self._special
        if len(ids) == 1:
            return b"" if skip_special and ids[0] in special else table[ids[0]]
        return b"".join([table[i] for i in ids if not (skip_special and i in special)])

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for (a special token: its name); empty for an id without text."""
        return self._bytes[token] if 0 <= token < len(self._bytes) else b""

    def token_text(self, token: int) -> str:
        """The text of one token; parts of a character become U+FFFD."""
        return self.token_bytes(token).decode(*_REPLACEMENT)

    def is_special(self, token: int) -> bool:
        """Whether the token is no text of its own (not shown unless asked for)."""
        return token in self._special

    def chat_text(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> str:
        """The prompt that the model's chat template writes. TextError if there is none or if it refuses the messages."""
        values = {"add_generation_prompt": True, "tools": None, "documents": None} | template_kwargs
        values |= {"bos_token": self._files.bos_token, "eos_token": self._files.eos_token}
        pieces, size = [], 0
        try:
            for piece in self._compiled().generate(messages=list(messages), **values):
                size += len(piece)
                if size > MAX_PROMPT_CHARS:
                    raise TextError(f"the chat template writes more than {MAX_PROMPT_CHARS} characters")
                pieces.append(piece)
        except TextError:
            raise
        except jinja2.TemplateError as error:
            raise TextError(f"chat template: {one_line(error)}") from None
        except Exception as error:  # noqa: BLE001 - a template is a program; messages that it did not expect fail it in any way
            raise TextError(f"chat template: {type(error).__name__}: {one_line(error)}") from None
        return "".join(pieces)

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of `chat_text`. The template writes the beginning token itself; GGUF files whose template leaves that to
        the loader get exactly one."""
        ids = self.encode(self.chat_text(messages, **template_kwargs), add_special=False)
        bos = self._data.bos_id
        if self._files.kind == "gguf" and self._files.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def _compiled(self) -> jinja2.Template:
        if self._template is None:
            if self._files.chat_template is None:
                raise TextError("this model has no chat template; use /v1/completions")
            self._template = _environment().from_string(self._files.chat_template)
        return self._template

    def _shown(self, text: str) -> str:
        return text[1:] if self.strips_space and text.startswith(" ") else text


class Detokenizer:
    """The text of a stream of tokens, piece by piece: the pieces together equal `Text.decode` of all ids. A character whose
    bytes are still incomplete is held back. The cost of a token does not depend on what came before.

    `continues`: the stream goes on behind a prompt, so its first space is text (SentencePiece tokenizers only).
    """

    def __init__(self, text: Text, skip_special: bool = True, continues: bool = False) -> None:
        self._text = text
        self._skip_special = skip_special
        self._strip = text.strips_space and not continues
        self._held = False  # part of a character
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; it may be empty."""
        data = self._text.join(ids, self._skip_special)
        if data.isascii() and not self._held:  # most are: the decoder costs several times as much
            piece = data.decode("ascii")
        else:
            piece = self._decoder.decode(data)
            self._held = bool(self._decoder.getstate()[0])
        return self._shown(piece) if self._strip else piece

    def finish(self) -> str:
        """What was held back, as U+FFFD. Call it once, at the end."""
        return self._shown(self._decoder.decode(b"", final=True))

    def _shown(self, piece: str) -> str:
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(" ")
        return piece


def _token_table(tokenizer: Tokenizer, data: TokenizerData, vocab: int) -> tuple[list[bytes], frozenset[int]]:
    """(bytes of each id, ids of special tokens). The table is as long as the model's vocabulary or, if that is longer, the
    tokenizer's: some know a padding token that the model has no row for."""
    if data.kind == "json":
        words = {i: token for token, i in tokenizer.get_vocab(with_added_tokens=False).items()}
        added = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    else:
        words = dict(enumerate(data.tokens))
        added = {i: token for i, token in enumerate(data.tokens) if data.token_types[i] in (CONTROL, USER_DEFINED, UNKNOWN)}
        special = {i for i, kind in enumerate(data.token_types) if kind in (CONTROL, UNKNOWN)}
    table = [b""] * max(vocab, 1 + max(words | added, default=-1))
    to_bytes = _byte_level_bytes if data.byte_level else _sentence_piece_bytes
    for i, token in words.items():
        table[i] = to_bytes(token, data.byte_tokens)
    for i, token in added.items():
        table[i] = token.encode()
    return table, frozenset(special)


_LETTERS = {ord(letter): byte for letter, byte in byte_letters().items()}
# Latin-1 characters outside the alphabet must not pass for bytes: they are sent where Latin-1 cannot follow
_LETTERS |= {c: 0x10FFFF for c in range(256) if c not in _LETTERS}


def _byte_level_bytes(token: str, byte_tokens: bool) -> bytes:
    try:
        return token.translate(_LETTERS).encode("latin-1")
    except UnicodeEncodeError:  # a token that was never written in the alphabet
        return token.encode()


def _sentence_piece_bytes(token: str, byte_tokens: bool) -> bytes:
    if byte_tokens and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_SPACE, " ").encode()


# chat templates -------------------------------------------------------------------------------------------------------
class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, which marks the assistant's part for training: here only its content counts."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox that also refuses to multiply texts into gigabytes."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("powers are not allowed")
        for thing, times in ((left, right), (right, left)):
            if isinstance(thing, (str, list, tuple)) and isinstance(times, int) and len(thing) * times > MAX_PROMPT_CHARS:
                raise jinja2.TemplateError(f"more than {MAX_PROMPT_CHARS} characters")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Sandbox:
    """The environment that chat templates are written for (transformers' chat_template_utils)."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
