"""Who may import whom, as the table in docs/architecture.md has it; and what every file must and must not have."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRODUCT = ("wire", "router", "gpu_worker", "hostcache", "sim", "parkade")
MAX_LINES = 500

# The longest matching prefix counts. What each part may import of the product, itself included.
OURS = {
    "wire": ("wire",),
    "wire.messages": (),
    "router": ("router", "wire"),
    "gpu_worker": ("gpu_worker", "wire"),
    "gpu_worker.policy": ("gpu_worker.policy", "wire.messages"),
    "hostcache": ("hostcache", "wire"),
    "sim": ("sim", "gpu_worker.policy", "wire.messages"),
    "parkade": ("parkade", "wire", "router.client", "sim"),
}
# Of others. A part that is not named may import what it likes, except what LIMITED keeps for somebody.
OTHERS = {
    "wire.messages": ("msgspec",),
    "gpu_worker.policy": ("msgspec",),
    "sim": ("msgspec",),
}
# Packages that only these parts may import.
LIMITED = {
    "torch": ("gpu_worker", "tools", "benchmarks"),
    "pycuda": ("gpu_worker.device.cuda", "gpu_worker.device.ops"),
    "jinja2": ("router.openai",),
    "tokenizers": ("router.openai", "wire", "tools"),
    "starlette": ("router.openai",),
    "uvicorn": ("router.openai",),
    "rich": ("parkade", "benchmarks", "tools"),
    "click": ("parkade", "benchmarks", "tools"),
    "matplotlib": ("parkade.sim_plot", "benchmarks"),
}
NO_TORCH = ("gpu_worker.policy",)
# A pure core hears events and says what is to be done: nothing that blocks, fails or differs between runs.
PURE = ("gpu_worker.policy", "router.ledger", "hostcache.budget", "wire.messages")
IMPURE_MODULES = (
    "time",
    "random",
    "secrets",
    "os",
    "socket",
    "select",
    "subprocess",
    "threading",
    "asyncio",
    "zmq",
    "datetime",
    "uuid",
)
FORBIDDEN_NAMES = ("shared_memory", "shm_open", "pickle")
FORBIDDEN_TEXT = ("/dev/shm", "shm_open")


def module_name(path: Path) -> str:
    """`gpu_worker.policy.pool` of a path."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, bool]]:
    """(full name of what is imported, whether at the top level of the module)."""
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((alias.name, id(node) in top) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = module or ""
                if level:
                    parents = package.split(".")
                    base = ".".join(parents[: len(parents) - level + 1] + ([module] if module else []))
                yield from ((f"{base}.{alias.name}", id(node) in top) for alias in names)


def within(name: str, *prefixes: str) -> bool:
    """Whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def rule(table: dict[str, tuple[str, ...]], module: str) -> tuple[str, ...] | None:
    """The entry of the longest prefix of `module`, None if there is none."""
    found = [prefix for prefix in table if within(module, prefix)]
    return table[max(found, key=len)] if found else None


def breaches(module: str, source: str, is_package: bool = False) -> list[str]:
    """What `source`, as the file of `module`, imports against the tables."""
    found = []
    package = module if is_package else module.rpartition(".")[0]
    for name, at_top in imports(ast.parse(source), package):
        outermost = name.partition(".")[0]
        if outermost == "tests" and not within(module, "tests"):
            found.append(f"{module} imports {name}: nothing imports tests")
        if within(module, *PRODUCT) and outermost in PRODUCT:
            allowed = rule(OURS, module)
            if not within(name, *allowed) and name not in allowed:
                found.append(f"{module} imports {name}, it may import {', '.join(allowed) or 'none of ours'}")
            continue
        users = LIMITED.get(outermost)
        if users and not within(module, "tests", *users):
            found.append(f"{module} imports {name}, which is for {', '.join(users)}")
        if outermost in ("torch", "pycuda") and within(module, *NO_TORCH):
            found.append(f"{module} imports {name}, it is pure")
        if outermost in ("pycuda", "matplotlib") and at_top:
            found.append(f"{module} imports {name} at its top, it must be imported where it is used")
        known = rule(OTHERS, module)
        if known is not None and outermost not in (*known, *sys.stdlib_module_names):
            found.append(f"{module} imports {name}, of others it may import {', '.join(known)} only")
        if within(module, *PURE) and outermost in IMPURE_MODULES:
            found.append(f"{module} imports {name}, a pure core has no {outermost}")
    return found


@pytest.mark.parametrize("path", files(*PRODUCT, "tools", "benchmarks"), ids=module_name)
def test_imports_keep_to_the_table(path: Path) -> None:
    assert not breaches(module_name(path), path.read_text(), path.name == "__init__.py")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("router.server", "import gpu_worker.policy.pool"),
        ("router.server", "from hostcache import budget"),
        ("hostcache.server", "from router.client import Client"),
        ("gpu_worker.worker", "from sim.world import World"),
        ("gpu_worker.policy.pool", "from wire.config import Config"),
        ("gpu_worker.policy.pool", "def f():\n    import torch"),
        ("gpu_worker.policy.pool", "from time import monotonic"),
        ("gpu_worker.policy.pool", "from ..model import load"),
        ("gpu_worker.policy.pool", "import numpy"),
        ("gpu_worker.device.cuda", "import pycuda.driver"),
        ("gpu_worker.model.load", "def f():\n    import pycuda"),
        ("wire.messages", "from wire import codec"),
        ("wire.messages", "import zmq"),
        ("wire.arena", "from torch import Tensor"),
        ("parkade.bench", "from router.server import Server"),
        ("parkade.bench", "from router import ledger"),
        ("sim.world", "from gpu_worker.runner import Runner"),
        ("router.ledger", "import random"),
        ("hostcache.budget", "import os"),
        ("wire.config", "from tests.conftest import HERE"),
    ],
)
def test_a_breach_is_found(module: str, source: str) -> None:
    assert breaches(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("gpu_worker.policy.pool", "from wire.messages import PoolCells\nfrom gpu_worker.policy import events"),
        ("gpu_worker.device.cuda", "def f():\n    import pycuda.driver"),
        ("parkade.serve", "from router.client import Client"),
        ("sim.world", "from wire.messages import Submit"),
    ],
)
def test_what_is_allowed_is_no_breach(module: str, source: str) -> None:
    assert not breaches(module, source)


@pytest.mark.parametrize("path", files(*PRODUCT, "tools", "benchmarks", "tests"), ids=module_name)
def test_every_file_says_what_it_is_for_and_is_short(path: Path) -> None:
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)) or not source.strip(), "no docstring"
    assert len(source.splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", files(*PRODUCT), ids=module_name)
def test_no_named_shared_memory_and_no_pickle(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {part for name, _ in imports(tree, "") for part in name.split(".")}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    assert not names & set(FORBIDDEN_NAMES)
    assert not [word for word in FORBIDDEN_TEXT if any(word in text for text in texts - docstrings)]


def test_the_folder_of_kernels_is_no_package() -> None:
    assert not (ROOT / "cuda" / "__init__.py").exists(), "it would shadow NVIDIA's package `cuda`"
