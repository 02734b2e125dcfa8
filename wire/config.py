"""Every setting, defined once: a flag of `parkade serve`, a TOML key and a PARKADE_... variable are made from one field.

Order of precedence: flag, environment, TOML file, default. `parkade serve` resolves the settings and hands them to its
children through the environment, so that `python -m router` needs no arguments there; under systemd the TOML file does it.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import FieldInfo


class ConfigError(ValueError):
    """A setting that the user must change; the text is one line that names it."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings. The description of a field is its help text; a field named `no_...` is a bare flag."""

    model: Annotated[
        str, Meta(description="smollm2, bard, toy (no language, for tests), a GGUF file, or a Hugging Face folder")
    ] = "smollm2"
    ctx: Annotated[
        int, Meta(ge=0, le=2**31, description="cells of the pool that all sequences share (0: as many as the card has room for)")
    ] = 8192
    slots: Annotated[int, Meta(ge=1, le=4096, description="how many sequences may run at once")] = 8
    policy: Annotated[
        Literal["watermark", "lookahead", "ondemand", "off"],
        Meta(description="when to park: above --high, --lookahead-steps before it would not fit, when it does not fit, never"),
    ] = "ondemand"
    high: Annotated[int, Meta(ge=1, le=100, description="percent of the pool at which parking starts")] = 94
    low: Annotated[int, Meta(ge=1, le=100, description="percent of the pool below which parked sequences resume")] = 80
    lookahead_steps: Annotated[int, Meta(ge=1, le=4096, description="decode steps that must fit (--policy lookahead)")] = 8
    protect_after: Annotated[int, Meta(ge=0, le=16, description="parks after which others are parked first")] = 3
    max_park_s: Annotated[float, Meta(ge=0, le=86400, description="parked for so long, it comes back first (0: never)")] = 300.0
    park_mode: Annotated[
        Literal["save", "recompute", "auto"],
        Meta(description="save parked cells while the budget allows, compute them again, or what is cheaper as measured"),
    ] = "save"
    park_ram: Annotated[str, Meta(description="RAM for parked cells (0: recompute; auto: 8GiB or memory/4)")] = "auto"
    resume_order: Annotated[Literal["most-parked", "head"], Meta(description="who resumes first (head: by park time)")] = "head"
    park_every: Annotated[int, Meta(ge=0, description="park every sequence at each N generated tokens (for tests; 0: never)")] = 0
    no_reuse: Annotated[bool, Meta(description="never find computed blocks again by the hash of their tokens")] = False
    exact: Annotated[Literal["on", "off"], Meta(description="streams equal their solo run byte for byte")] = "on"
    max_queued: Annotated[int, Meta(ge=0, description="requests that may wait before new ones get 429")] = 256
    draft: Annotated[str, Meta(description="tokens the model's head drafts a step, 0 to 8 (auto: 2 where that pays)")] = "auto"
    device: Annotated[
        str, Meta(description="auto (the first card, else the CPU), or a comma list with one worker each, e.g. cuda:0,cuda:1")
    ] = "auto"
    gpu_memory: Annotated[
        float, Meta(gt=0, le=1, description="share of a card's free memory that its worker takes", extra={"metavar": "SHARE"})
    ] = 0.9
    dtype: Annotated[Literal["auto", "bf16", "f32"], Meta(description="auto: 4-bit weights stay so, others are bf16")] = "auto"
    step_tokens: Annotated[int, Meta(ge=1, le=65536, description="tokens one step may feed: a prefill chunk")] = 256
    journal: Annotated[str, Meta(description="file for all that a worker's scheduler hears and plans, prompts included")] = ""
    host: Annotated[str, Meta(description="address of the HTTP adapter")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port of the HTTP adapter (0: a free one)")] = 8080
    run_dir: Annotated[str, Meta(description="folder of the sockets (default: a fresh one, mode 0700)")] = ""
    listen: Annotated[str, Meta(description="TCP address for ZeroMQ clients too, like tcp://10.0.0.1:5555 (default: none)")] = ""
    curve_file: Annotated[str, Meta(description="file with the server's secret CURVE key, see `parkade keygen` (--listen)")] = ""
    curve_clients: Annotated[str, Meta(description="file with NAME and public CURVE key of each client that may connect")] = ""
    drain_s: Annotated[float, Meta(ge=0, le=86400, description="seconds that streams get to finish on SIGTERM")] = 30.0
    api_key_file: Annotated[str, Meta(description="file with an API key a line, KEY or NAME KEY (without: none is needed)")] = ""
    admin_key_file: Annotated[str, Meta(description="the same for /slots and parks (no key file: for this machine only)")] = ""
    key_requests: Annotated[int, Meta(ge=0, description="requests that each API key may have at once (0: no limit)")] = 0
    key_queued_tokens: Annotated[int, Meta(ge=0, description="prompt tokens of each API key that may wait (0: no limit)")] = 0
    key_cells: Annotated[int, Meta(ge=0, le=100, description="percent of the pool for the requests of each API key (0: all)")] = 0


DRAFT_MOST = 8
CTX_LEAST = 16  # one block
FIELDS = msgspec.structs.fields(Config)
_POLICY_FIELDS = (
    "slots", "step_tokens", "policy", "high", "low", "lookahead_steps", "protect_after", "resume_order", "max_park_s",
    "park_mode",
)  # fmt: skip
_CARD = re.compile(r"cuda(?::(\d{1,3}))?")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?)b?|b?)\s*", re.IGNORECASE)


def env_name(field: str) -> str:
    """The environment variable of a setting: `park_ram` is PARKADE_PARK_RAM."""
    return "PARKADE_" + field.upper()


def flag_name(field: str) -> str:
    """The flag of a setting: `park_ram` is --park-ram."""
    return "--" + field.replace("_", "-")


def is_switch(field: FieldInfo) -> bool:
    """Whether the setting is a bare flag without a value."""
    return field.type is bool or getattr(field.type, "__origin__", None) is bool


def metavar(field: FieldInfo) -> str:
    """What the help shows for the value: the choices, or the kind of value."""
    (meta,) = field.type.__metadata__
    kind = field.type.__origin__
    if meta.extra:
        return meta.extra["metavar"]
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    return {int: "N", float: "SECONDS"}.get(kind, "TEXT")


def help_text(field: FieldInfo) -> str:
    """The setting's description and default, as one line of help."""
    (meta,) = field.type.__metadata__
    shown = "" if is_switch(field) or field.default == "" else f" [default: {field.default}]"
    return f"{meta.description}{shown}"


def size_bytes(text: str) -> int:
    """Bytes of a size such as 8GiB, 16MiB, 2GB or 4096; ConfigError if it is none."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r} is not a size; write it like 8GiB, 16MiB or 0")
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** (" kmgt".index(prefix.lower()) if prefix else 0)
    size = float(number) * unit
    if size >= 2**63:
        raise ConfigError(f"{text[:20]}... is more than any machine has")
    return int(size)


def draft_length(text: str) -> int | None:
    """Tokens to draft, 0 to DRAFT_MOST, or None for "auto"; ConfigError for anything else."""
    if text == "auto":
        return None
    if text not in map(str, range(DRAFT_MOST + 1)):
        raise ConfigError(f"--draft {text!r} must be auto or a number from 0 to {DRAFT_MOST}")
    return int(text)


def devices(text: str) -> dict[str, str]:
    """The devices of `--device`, by the name of the worker that each gets: `cpu,cuda:1` is {"cpu0": "cpu", "cuda1": "cuda:1"}.
    `auto` is one, and its worker decides which. ConfigError for one that cannot be."""
    if text.strip() == "auto":
        return {"worker0": "auto"}
    found: dict[str, str] = {}
    for part in map(str.strip, text.split(",")):
        if part == "cpu":
            found[f"cpu{sum(device == 'cpu' for device in found.values())}"] = "cpu"
        elif card := _CARD.fullmatch(part):
            index = int(card[1] or 0)
            if f"cuda{index}" in found:
                raise ConfigError(f"--device {text}: cuda:{index} is named twice; a card has one worker")
            found[f"cuda{index}"] = f"cuda:{index}"
        else:
            raise ConfigError(f"--device {part!r} is not known; choose auto, cpu, cuda:0, or a comma list such as cuda:0,cuda:1")
    return found


def device_of(worker: str, text: str) -> str:
    """The device of the worker with this name. ConfigError if `--device` has several and none of them is its."""
    found = devices(text)
    if worker in found:
        return found[worker]
    if len(found) > 1:
        raise ConfigError(f"--device {text}: no worker of it is named {worker}; choose one of {', '.join(found)}")
    return next(iter(found.values()))


def load(
    flags: Mapping[str, Any] | None = None, config_file: str | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """The settings from flags, environment, file and defaults. ConfigError is one line that names the setting."""
    environ = os.environ if environ is None else environ
    path = config_file or environ.get("PARKADE_CONFIG")
    values: dict[str, Any] = _read_toml(path) if path else {}
    values |= {f.name: environ[env_name(f.name)] for f in FIELDS if env_name(f.name) in environ}
    values |= {name: value for name, value in (flags or {}).items() if value is not None}
    hints = get_type_hints(Config, include_extras=True)
    if isinstance(draft := values.get("draft"), int) and not isinstance(draft, bool):
        values["draft"] = str(draft)  # in a file, a number is as good
    for name, value in values.items():
        try:
            values[name] = msgspec.convert(value, hints[name], strict=False)
        except msgspec.ValidationError as error:
            kind = get_args(hints[name])[0]
            why = f" is not known; choose one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else f": {error}"
            raise ConfigError(f"{flag_name(name)} {value!r}{why}") from None
    config = Config(**values)
    if 0 < config.ctx < CTX_LEAST:
        raise ConfigError(f"--ctx {config.ctx} must be at least {CTX_LEAST}, or 0")
    if config.low >= config.high:
        raise ConfigError(f"--low {config.low} must be below --high {config.high}")
    if config.park_ram != "auto":
        try:
            size_bytes(config.park_ram)
        except ConfigError as error:
            raise ConfigError(f"--park-ram {error}") from None
    draft_length(config.draft)
    devices(config.device)
    return config


def policy_settings(config: Config) -> dict[str, Any]:
    """The settings that the scheduler takes as they are, by the names that both sides use: for the worker and for the simulator.
    With `--park-ram 0` there is nowhere to save to, whatever `--park-mode` says."""
    values = {name: getattr(config, name) for name in _POLICY_FIELDS}
    if config.park_ram != "auto" and size_bytes(config.park_ram) == 0:
        values["park_mode"] = "recompute"
    return values


def as_environ(config: Config) -> dict[str, str]:
    """The settings as PARKADE_... variables for a child process."""
    return {env_name(f.name): str(getattr(config, f.name)) for f in FIELDS}


def _read_toml(path: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    known = {f.name for f in FIELDS}
    for name in values:
        if name.replace("-", "_") not in known:
            raise ConfigError(f"--config {path}: unknown key {name!r}")
    return {name.replace("-", "_"): value for name, value in values.items()}
