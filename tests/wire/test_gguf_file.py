"""GGUF headers: what is read, and that every damaged file is one line that names it."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.make_models import VOCAB, random_weights, write_gguf
from wire.gguf_file import can_dequantise, read_gguf
from wire.model_files import ModelError, find_model


def complaint(path: Path) -> str:
    """The one line that find_model says about a model; it names the path."""
    with pytest.raises(ModelError) as caught:
        find_model(str(path))
    text = str(caught.value)
    assert text
    assert "\n" not in text
    assert str(path) in text
    return text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_metadata_and_tensors_equal_the_reference_reader(tiny: Path) -> None:
    ours, theirs = read_gguf(tiny), gguf.GGUFReader(tiny)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.offset, info.nbytes, info.dtype) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)


def test_bytes_at_the_offset_are_the_weights(tiny: Path) -> None:
    info = read_gguf(tiny).tensors["blk.1.ffn_down.weight"]
    found = np.fromfile(info.file, np.float32, 64 * 96, offset=info.offset).reshape(info.shape)
    assert np.array_equal(found, random_weights()["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantised_matrices(tmp_path: Path, quant: str) -> None:
    files = find_model(str(write_gguf(tmp_path / "m.gguf", quant=quant, tied=False)))
    assert files.tensors["blk.0.attn_q.weight"].dtype == quant
    assert files.tensors["blk.0.attn_norm.weight"].dtype == "F32"
    assert not files.spec.tied
    assert files.spec.vocab == VOCAB


def test_dequantisable_types() -> None:
    assert can_dequantise("Q4_K")
    assert can_dequantise("IQ2_XXS")
    assert not can_dequantise("Q8_K")


@pytest.mark.parametrize(("arch", "bias", "norm"), [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)])
def test_architectures(tmp_path: Path, arch: str, bias: bool, norm: bool) -> None:
    spec = find_model(str(write_gguf(tmp_path / "m.gguf", arch, heads=8, head_dim=32))).spec
    assert (spec.arch, spec.qkv_bias, spec.qk_norm, spec.o_bias) == (arch, bias, norm, False)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_context) == (8, 2, 32, 512)


def test_llama_with_biases(tmp_path: Path) -> None:
    spec = find_model(str(write_gguf(tmp_path / "m.gguf", attention_bias=True, mlp_bias=True))).spec
    assert spec.qkv_bias
    assert spec.o_bias
    assert spec.mlp_bias


def test_rope_frequencies_become_factors(tmp_path: Path) -> None:
    factors = [1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    assert find_model(str(write_gguf(tmp_path / "m.gguf", rope_freqs=factors))).spec.rope.factors == tuple(factors)
    assert "rope_freqs" in complaint(write_gguf(tmp_path / "short.gguf", rope_freqs=factors[:4]))
    assert "rope_freqs" in complaint(write_gguf(tmp_path / "zero.gguf", rope_freqs=[0.0] * 8))


def test_rope_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    spec = find_model(str(write_gguf(tmp_path / "linear.gguf", metadata=linear))).spec
    assert (spec.rope.kind, spec.rope.factor, spec.max_context) == ("linear", 2.0, 1024)
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 128}
    spec = find_model(str(write_gguf(tmp_path / "yarn.gguf", metadata=yarn))).spec
    assert (spec.rope.kind, spec.rope.original_context, spec.rope.attention_factor, spec.max_context) == ("yarn", 128, None, 512)
    other = {"llama.rope.scaling.type": "longrope"}
    assert "'longrope'" in complaint(write_gguf(tmp_path / "other.gguf", metadata=other))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 3}, "missing tensor blk.2.attn_norm.weight"),
        ({"llama.block_count": 1}, "blk.1."),
        ({"llama.block_count": 2**31}, "layers"),
        ({"llama.block_count": "2"}, "llama.block_count is a str"),
        ({"llama.embedding_length": 96}, "expected"),
        ({"llama.attention.head_count": 0}, "num_heads is 0"),
        ({"llama.attention.head_count": 3}, "no multiple"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.feed_forward_length": 128}, "[96, 64], expected [128, 64]"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_eps"),
        ({"llama.attention.sliding_window": 128}, "sliding window of 128"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer 'bert'"),
        ({"tokenizer.ggml.pre": "kimi-k2"}, "pre-tokenizer 'kimi-k2'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": ["a"] * (VOCAB + 1), "tokenizer.ggml.token_type": None}, "rows"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type"),
        ({"tokenizer.ggml.eos_token_id": 100000}, "100000"),
        ({"general.alignment": 48}, "alignment"),
        ({"split.count": 2}, "2 files"),
    ],
)
def test_what_cannot_be_served_is_named(tmp_path: Path, metadata: dict[str, object], words: str) -> None:
    assert words in complaint(write_gguf(tmp_path / "m.gguf", metadata=metadata))


def test_a_window_that_never_applies_is_no_matter(tmp_path: Path) -> None:
    find_model(str(write_gguf(tmp_path / "m.gguf", metadata={"llama.attention.sliding_window": 512})))


def test_missing_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", drop=("blk.1.ffn_up.weight",))
    assert "missing tensor blk.1.ffn_up.weight" in complaint(path)
    assert "missing tensor token_embd.weight" in complaint(write_gguf(tmp_path / "n.gguf", drop=("token_embd.weight",)))


def test_a_file_in_parts(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", metadata={"split.count": 2})
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    names = tuple(name for name in read_gguf(write_gguf(tmp_path / "one.gguf")).tensors if name.startswith("blk.1."))
    write_gguf(first, drop=names, metadata={"split.count": 2})
    assert f"{second}" in complaint_about(first)
    others = tuple(name for name in read_gguf(tmp_path / "one.gguf").tensors if name not in names)
    write_gguf(second, drop=others, metadata={"split.count": 2})
    files = find_model(str(first))
    assert files.tensors["blk.1.ffn_up.weight"].file == str(second)
    assert files.tensors["blk.0.ffn_up.weight"].file == str(first)
    write_gguf(second, metadata={"split.count": 2})
    assert "already in another part" in complaint_about(first)
    assert "00001-of-00002" in complaint(whole)


def complaint_about(path: Path) -> str:
    """As `complaint`, for one that names another file."""
    with pytest.raises(ModelError) as caught:
        find_model(str(path))
    return str(caught.value)


def test_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"")
    complaint(path)
    path.write_bytes(b"GGUF")
    assert "truncated" in complaint(path)
    path.write_bytes(b"\x00" * 4096)
    assert "not a GGUF file" in complaint(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + bytes(64))
    assert "version 1" in complaint(path)
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + bytes(64))
    assert "big-endian" in complaint(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63) + bytes(4096))
    complaint(path)


def test_every_cut_is_one_line(tiny: Path, tmp_path: Path) -> None:
    data, path = tiny.read_bytes(), tmp_path / "cut.gguf"
    rng = random.Random(7)
    cuts = {*range(200), *(rng.randrange(len(data)) for _ in range(400)), len(data) - 1}
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        complaint(path)


def outcome(path: Path) -> str:
    """What find_model says against a model; empty if it takes it. Another exception than ModelError fails the test."""
    try:
        find_model(str(path))
    except ModelError as error:
        return str(error) or "nothing"
    return ""


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 12000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4))
def test_a_damaged_header_is_read_or_refused(tiny: Path, tmp_path: Path, changes: list[tuple[int, bytes]]) -> None:
    data = bytearray(tiny.read_bytes())
    for at, new in changes:
        data[at : at + len(new)] = new
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    said = outcome(path)
    assert "\n" not in said
    assert not said or str(path) in said


def test_unknown_tensor_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()
    name = b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dimensions and two of them
    path.write_bytes(data[:at] + struct.pack("<I", 99) + data[at + 4 :])
    text = complaint(path)
    assert "blk.0.attn_q.weight" in text
    assert "99" in text


def test_a_type_that_cannot_be_dequantised_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", hidden=256, heads=16, drop=("blk.0.ffn_up.weight",), extra={"blk.0.ffn_up.weight": "Q8_K"}
    )
    text = complaint(path)
    assert "blk.0.ffn_up.weight" in text
    assert "Q8_K" in text
