"""What a model is, apart from its numbers: its shape (ModelSpec), its tensors' names, shapes and places, and its user errors."""

import math

from msgspec import Struct

from wire.config import ConfigError


class ModelError(ConfigError):
    """A model that cannot be served; the text is one line that names the file and the thing."""


class RopeSpec(Struct, frozen=True):
    """Rotary positions: frequency of pair j is `theta**(-2j/d)`, changed by `kind`, then divided by `factors[j]` if given.

    d is how many dimensions of a head are rotated. kind "linear" divides every frequency by `factor`; "llama3" and "yarn"
    are the formulas of transformers' rope_utils (`original_context` is their `original_max_position_embeddings`).
    `attention_factor` scales cos and sin of yarn; None means `0.1 * ln(factor) + 1`. `factors` (d / 2 divisors) come from a
    GGUF file's `rope_freqs.weight`.
    """

    theta: float = 10000.0
    kind: str = "default"  # default, linear, llama3, yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    factors: tuple[float, ...] = ()


class DeltaSpec(Struct, frozen=True):
    """The layers that keep a recurrent state instead of cells (gated delta net): which they are, and the shape of their state.

    Value head j is served by key head `j // (value_heads / key_heads)`. The convolution runs over the channels of q, k and v,
    in this order.
    """

    layers: tuple[int, ...]  # ascending; every other layer of the model has attention
    key_heads: int
    value_heads: int
    key_dim: int  # of one head
    value_dim: int
    kernel: int  # taps of the causal convolution

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: q, k, v."""
        return 2 * self.key_width + self.value_width


class MtpSpec(Struct, frozen=True):
    """The head that drafts: one attention layer with the trunk's head counts, fed with (hidden row p, token p + 1)."""

    intermediate: int
    draft_vocab: int = 0  # rows of `mtp.draft_token_ids`, the only tokens it drafts; 0: all


class ModelSpec(Struct, frozen=True):
    """The shape of a decoder-only transformer with RMSNorm, rotary grouped-query attention and a SiLU-gated MLP.

    `arch` names the family; everything that changes the arithmetic has a field of its own, so nobody needs to branch on
    `arch`, with two exceptions, both in GGUF files: those of arch "llama" store the rows of q and k (and their biases)
    permuted to interleaved rotary pairs, those of arch "qwen35" the value heads of delta layers tiled. `vocab` is the
    number of rows of the embedding (a tokenizer may know fewer ids).
    """

    arch: str  # llama, qwen2, qwen3, qwen35
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    rope: RopeSpec
    tied: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    mlp_bias: bool
    max_context: int
    rotary_dim: int = 0  # dimensions of a head that are rotated, from the first on; 0: all
    attn_gate: bool = False  # rows of q are [query | gate] for each head; the output of attention is multiplied by sigmoid(gate)
    norm_offset: float = 0.0  # what a file leaves out of every norm's weight except that of a delta layer's output
    delta: DeltaSpec | None = None
    mtp: MtpSpec | None = None  # None: no head, or not wanted

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have cells, ascending."""
        recurrent = self.delta.layers if self.delta else ()
        return tuple(i for i in range(self.num_layers) if i not in recurrent)

    @property
    def kv_layers(self) -> int:
        """Layers of a cell: those with attention, in their order, then the head's own."""
        return len(self.attention_layers) + (self.mtp is not None)


class TensorInfo(Struct, frozen=True):
    """Where a tensor's bytes lie: `nbytes` from `offset` of `file`. `shape` in torch order (rows first); `dtype` is F32, F16,
    BF16 or the name of a GGUF quantisation such as Q4_1."""

    shape: tuple[int, ...]
    dtype: str
    file: str
    offset: int
    nbytes: int


MAX_LAYERS = 4096  # a sanity bound: a damaged header must not make anybody list tensors for minutes

_LAYER_NAMES = {  # uniform name -> (GGUF, Hugging Face), within a layer
    "attn_norm": ("attn_norm.weight", "input_layernorm.weight"),
    "q": ("attn_q.weight", "self_attn.q_proj.weight"),
    "q_gate": ("attn_q.weight", "self_attn.q_proj.weight"),
    "k": ("attn_k.weight", "self_attn.k_proj.weight"),
    "v": ("attn_v.weight", "self_attn.v_proj.weight"),
    "o": ("attn_output.weight", "self_attn.o_proj.weight"),
    "q_bias": ("attn_q.bias", "self_attn.q_proj.bias"),
    "k_bias": ("attn_k.bias", "self_attn.k_proj.bias"),
    "v_bias": ("attn_v.bias", "self_attn.v_proj.bias"),
    "o_bias": ("attn_output.bias", "self_attn.o_proj.bias"),
    "q_norm": ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    "k_norm": ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    "mlp_norm": ("ffn_norm.weight", "post_attention_layernorm.weight"),
    "gate": ("ffn_gate.weight", "mlp.gate_proj.weight"),
    "up": ("ffn_up.weight", "mlp.up_proj.weight"),
    "down": ("ffn_down.weight", "mlp.down_proj.weight"),
    "gate_bias": ("ffn_gate.bias", "mlp.gate_proj.bias"),
    "up_bias": ("ffn_up.bias", "mlp.up_proj.bias"),
    "down_bias": ("ffn_down.bias", "mlp.down_proj.bias"),
}
_TOP_NAMES = {
    "embed": ("token_embd.weight", "model.embed_tokens.weight"),
    "norm": ("output_norm.weight", "model.norm.weight"),
    "head": ("output.weight", "lm_head.weight"),
}
_DELTA_NAMES = {  # of a layer with a recurrent state; its MLP and norms are named as everywhere
    "in_qkv": ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    "in_z": ("attn_gate.weight", "linear_attn.in_proj_z.weight"),
    "in_a": ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    "in_b": ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    "conv": ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    "dt_bias": ("ssm_dt.bias", "linear_attn.dt_bias"),
    "decay": ("ssm_a", "linear_attn.A_log"),
    "state_norm": ("ssm_norm.weight", "linear_attn.norm.weight"),
    "out": ("ssm_out.weight", "linear_attn.out_proj.weight"),
}
_HEAD_NAMES = {  # of the head, beside those of its layer
    "fc": ("nextn.eh_proj.weight", "mtp.fc.weight"),
    "embed_norm": ("nextn.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
    "hidden_norm": ("nextn.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
    "norm": ("nextn.shared_head_norm.weight", "mtp.norm.weight"),
    "draft_ids": ("nextn.draft_token_ids", "mtp.draft_token_ids"),
}
_COLUMN = {"gguf": 0, "hf": 1}
_LAYER_PREFIX = {"gguf": "blk.{}.", "hf": "model.layers.{}."}
HEAD_PREFIX = "mtp."  # of the head's tensors: of their uniform names, and of those in safetensors files


def layer_prefix(kind: str) -> str:
    """What the names of all layers' tensors begin with in files of `kind`."""
    return _LAYER_PREFIX[kind].partition("{}")[0]


def tensor_names(spec: ModelSpec, kind: str, head_kind: str = "") -> dict[str, str]:
    """Uniform name -> name in files of `kind` ("gguf" or "hf"), for every tensor that this spec needs and no other.

    `head_kind`: the naming of the head's tensors, if it is another. With a gate on attention, `q` and `q_gate` are rows of
    one tensor.
    """
    return {
        name: _file_name(spec, name, (head_kind or kind) if name.startswith(HEAD_PREFIX) else kind)
        for name in tensor_shapes(spec)
    }


def file_shape(spec: ModelSpec, name: str, kind: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in files of `kind` of the tensor that holds `name`, whose own shape is `shape`."""
    match name.rpartition(".")[2]:
        case "q" | "q_gate" if spec.attn_gate:
            return (2 * shape[0], *shape[1:])
        case "conv" if kind == "hf":
            return (shape[0], 1, shape[1])
        case _:
            return shape


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Uniform name -> shape in torch order (a linear layer is [out, in]), for every tensor that this spec needs."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab, spec.hidden), "norm": (spec.hidden,)}
    if not spec.tied:
        shapes["head"] = (spec.vocab, spec.hidden)
    mlp = _mlp_shapes(spec, spec.intermediate)
    attention = _attention_shapes(spec) | mlp
    recurrent = _delta_shapes(spec.hidden, spec.delta) | mlp if spec.delta else {}
    for i in range(spec.num_layers):
        layer = recurrent if spec.delta and i in spec.delta.layers else attention
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if spec.mtp:
        head = {"fc": (spec.hidden, 2 * spec.hidden)} | dict.fromkeys(("embed_norm", "hidden_norm", "norm"), (spec.hidden,))
        if spec.mtp.draft_vocab:
            head["draft_ids"] = (spec.mtp.draft_vocab,)
        shapes |= {f"mtp.{name}": shape for name, shape in head.items()}
        layer = _attention_shapes(spec) | _mlp_shapes(spec, spec.mtp.intermediate)
        shapes |= {f"mtp.layer.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (spec.hidden,),
        "q": (q_rows, spec.hidden),
        "k": (kv_rows, spec.hidden),
        "v": (kv_rows, spec.hidden),
        "o": (spec.hidden, q_rows),
    }
    if spec.attn_gate:
        shapes |= {"q_gate": (q_rows, spec.hidden)}
    if spec.qkv_bias:
        shapes |= {"q_bias": (q_rows,), "k_bias": (kv_rows,), "v_bias": (kv_rows,)}
    if spec.o_bias:
        shapes |= {"o_bias": (spec.hidden,)}
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    return shapes


def _mlp_shapes(spec: ModelSpec, intermediate: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "mlp_norm": (spec.hidden,),
        "gate": (intermediate, spec.hidden),
        "up": (intermediate, spec.hidden),
        "down": (spec.hidden, intermediate),
    }
    if spec.mlp_bias:
        shapes |= {"gate_bias": (intermediate,), "up_bias": (intermediate,), "down_bias": (spec.hidden,)}
    return shapes


def _delta_shapes(hidden: int, delta: DeltaSpec) -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm": (hidden,),
        "in_qkv": (delta.conv_width, hidden),
        "in_z": (delta.value_width, hidden),
        "in_a": (delta.value_heads, hidden),
        "in_b": (delta.value_heads, hidden),
        "conv": (delta.conv_width, delta.kernel),
        "dt_bias": (delta.value_heads,),
        "decay": (delta.value_heads,),
        "state_norm": (delta.value_dim,),
        "out": (hidden, delta.value_width),
    }


def check_spec(spec: ModelSpec, where: str) -> ModelSpec:
    """`spec` itself if its numbers make sense together; ModelError, beginning with `where`, if not."""
    for field in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "vocab", "max_context"):
        if not 1 <= (value := getattr(spec, field)) <= 2**31:
            raise ModelError(f"{where}: {field} is {value}")
    if spec.num_layers > MAX_LAYERS:
        raise ModelError(f"{where}: {spec.num_layers} layers are more than {MAX_LAYERS}")
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{where}: {spec.num_heads} query heads are no multiple of {spec.num_kv_heads} key-value heads")
    if spec.head_dim % 2:
        raise ModelError(f"{where}: the head dimension {spec.head_dim} is odd, rotary positions need pairs")
    if spec.rotary_dim % 2 or not 0 <= spec.rotary_dim <= spec.head_dim:
        raise ModelError(f"{where}: {spec.rotary_dim} rotated dimensions of a head of {spec.head_dim}")
    if spec.delta:
        _check_delta(spec.delta, spec.num_layers, where)
    if spec.mtp and not (1 <= spec.mtp.intermediate <= 2**31 and 0 <= spec.mtp.draft_vocab <= spec.vocab):
        raise ModelError(f"{where}: a head with {spec.mtp.intermediate} MLP rows that drafts {spec.mtp.draft_vocab} tokens")
    rope = spec.rope
    reals = {"rms_eps": spec.rms_eps, "rope theta": rope.theta, "rope factor": rope.factor}
    reals |= {"rope beta_fast": rope.beta_fast, "rope beta_slow": rope.beta_slow}
    reals |= {"rope attention_factor": 1.0 if rope.attention_factor is None else rope.attention_factor}
    for field, value in reals.items():
        if not 0 < value < math.inf:
            raise ModelError(f"{where}: {field} is {value}")
    if rope.theta <= 1:
        raise ModelError(f"{where}: rope theta is {rope.theta}")
    if rope.kind in ("llama3", "yarn") and rope.original_context < 1:
        raise ModelError(f"{where}: {rope.kind} rope scaling without the original context length")
    if rope.kind == "llama3" and not 0 < rope.low_freq_factor < rope.high_freq_factor:
        raise ModelError(f"{where}: llama3 rope scaling needs low_freq_factor below high_freq_factor")
    return spec


def _check_delta(delta: DeltaSpec, num_layers: int, where: str) -> None:
    for field in ("key_heads", "value_heads", "key_dim", "value_dim"):
        if not 1 <= (value := getattr(delta, field)) <= 2**20:
            raise ModelError(f"{where}: {field} of the recurrent layers is {value}")
    if not 2 <= delta.kernel <= 16:
        raise ModelError(f"{where}: a convolution over {delta.kernel} tokens is not supported")
    if delta.value_heads % delta.key_heads:
        raise ModelError(f"{where}: {delta.value_heads} value heads are no multiple of {delta.key_heads} key heads")
    if not 1 <= len(delta.layers) < num_layers:
        raise ModelError(f"{where}: {len(delta.layers)} of {num_layers} layers are recurrent; both kinds are needed")


def scaled_context(context: int, rope: RopeSpec) -> int:
    """Tokens that a model of `context` trained positions takes with its rope scaling (as other servers count it)."""
    if not 0 < rope.factor < 2**31:
        return context  # check_spec refuses it, or it is no use
    match rope.kind:
        case "linear":
            return int(context * max(rope.factor, 1.0))
        case "yarn":
            return max(context, int(rope.original_context * rope.factor))
        case _:  # llama3 files already state the long context
            return context


def one_line(error: BaseException | str) -> str:
    """A message that any log can take: no line breaks, no lone surrogates, bounded in length."""
    text = " ".join(str(error).split()).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 300 else text[:297] + "..."


def _file_name(spec: ModelSpec, name: str, kind: str) -> str:
    column = _COLUMN[kind]
    match name.split("."):
        case ["mtp", "layer", part]:
            prefix = "mtp.layers.0." if kind == "hf" else _LAYER_PREFIX[kind].format(spec.num_layers)
            return prefix + _part_name(spec, part, kind)
        case ["mtp", part]:
            return ("" if kind == "hf" else _LAYER_PREFIX[kind].format(spec.num_layers)) + _HEAD_NAMES[part][column]
        case [_, layer, part]:
            return _LAYER_PREFIX[kind].format(layer) + _part_name(spec, part, kind)
        case _:
            return _TOP_NAMES[name][column]


def _part_name(spec: ModelSpec, part: str, kind: str) -> str:
    """The name within a layer."""
    if part == "mlp_norm" and kind == "gguf" and spec.arch == "qwen35":
        return "post_attention_norm.weight"
    return (_DELTA_NAMES.get(part) or _LAYER_NAMES[part])[_COLUMN[kind]]
