"""`python -m tools.train bard | collect | head`: trains the models in wire/models. A run that is stopped goes on where it was."""

from pathlib import Path

import click

from tools.training.progress import Progress

MODELS = Path(__file__).parent.parent / "wire" / "models"


@click.group()
def main() -> None:
    """Train what ships in wire/models."""


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True, help="folder of the checkpoint and the tokenizer")
@click.option("--out", type=click.Path(path_type=Path), default=MODELS / "bard", show_default=True)
@click.option("--steps", default=2400, show_default=True)
@click.option("--rows", default=8, show_default=True, help="windows a step")
@click.option("--length", default=512, show_default=True, help="tokens a window")
@click.option("--rate", default=3e-3, show_default=True, help="peak learning rate")
def bard(work: Path, out: Path, steps: int, rows: int, length: int, rate: float) -> None:
    """The tiny hybrid and its head, from public-domain text."""
    from tools.training.bard import train

    with Progress("bard") as progress:
        train(work, out, steps, rows, length, rate, progress)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True, help="folder of the shards")
@click.option("--sequences", default=4096, show_default=True, help="of 512 tokens; 0.6 MB each")
@click.option("--rows", default=32, show_default=True, help="chats at once")
def collect(work: Path, sequences: int, rows: int) -> None:
    """Tokens and hidden rows of SmolLM2, from its own chats and from public-domain text."""
    from tools.training.smollm2 import collect as run

    with Progress("collect") as progress:
        run(work, sequences, rows, progress)


@main.command()
@click.option("--work", type=click.Path(path_type=Path), required=True, help="folder of the checkpoint")
@click.option("--shards", type=click.Path(path_type=Path), required=True, help="what `collect` has made")
@click.option("--out", type=click.Path(path_type=Path), default=MODELS / "smollm2-mtp", show_default=True)
@click.option("--steps", default=2000, show_default=True)
@click.option("--rows", default=4, show_default=True, help="sequences a step")
@click.option("--rate", default=1e-3, show_default=True, help="peak learning rate")
def head(work: Path, shards: Path, out: Path, steps: int, rows: int, rate: float) -> None:
    """The head that drafts for SmolLM2."""
    from tools.training.smollm2 import train

    with Progress("head") as progress:
        train(work, shards, out, steps, rows, rate, progress)


if __name__ == "__main__":
    main()
