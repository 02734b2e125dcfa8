"""The options of `parkade sim`. Those that `parkade serve` has too are made from the same settings and mean the same."""

from collections.abc import Callable

import click

from parkade.number import Real
from wire import config as settings
from wire.config import FIELDS

SLOWEST = 1e-6  # load, and requests a second: with less, virtual time would pass the exact numbers
SETTINGS = (
    "ctx",
    "slots",
    "policy",
    "high",
    "low",
    "lookahead_steps",
    "protect_after",
    "max_park_s",
    "park_mode",
    "park_ram",
    "resume_order",
    "no_reuse",
    "step_tokens",
)
LISTS = ("policy", "resume_order")  # may be comma lists: what is compared

OWN = (
    click.option("--trace", metavar="FILE", help="JSON Lines, one request a line (docs/simulator.md)"),
    click.option("--workload", metavar="NAME", help="uniform, measured, heavy, bursty or agents"),
    click.option(
        "--journal", metavar="FILE", help="instead: replay a journal of `parkade serve --journal`; its plans must be the same"
    ),
    click.option("--requests", type=click.IntRange(1), metavar="N", help="of a workload [default: 300]"),
    click.option("--mean-cells", type=click.IntRange(2), metavar="N", help="tokens of a request, prompt and answer, on average"),
    click.option("--load", type=Real(SLOWEST), metavar="X", help="share of what the machine can do [default: 1]"),
    click.option("--rate", type=Real(SLOWEST), metavar="R", help="instead: requests a second; inf: all at once"),
    click.option("--priorities", metavar="N,N", help="classes that requests draw from [default: 0]"),
    click.option("--seeds", metavar="A..B", help="of a workload; one run each [default: 1]"),
    click.option(
        "--costs", default="cpu", show_default=True, metavar="NAME|FILE", help="what steps and copies take: cpu, card, a file"
    ),
    click.option("--free-parks", is_flag=True, help="copies take no time: the bound for any way to save"),
    click.option("--jobs", type=click.IntRange(1), metavar="N", help="runs at the same time [default: one a processor]"),
    click.option("--write", metavar="FILE", help="write the trace of the first seed"),
    click.option("--json", "json_file", metavar="FILE", help="write all figures of all runs"),
    click.option("--plot", metavar="FILE.svg", help="draw the figures and the pool over time (needs matplotlib)"),
)


def sim_options(command: click.Command) -> click.Command:
    """Add them all. Values of settings arrive as text, as in `serve`, under the setting's name."""
    for field in FIELDS:
        if field.name not in SETTINGS:
            continue
        flag, text = settings.flag_name(field.name), settings.help_text(field)
        if settings.is_switch(field):
            option = click.Option([flag, field.name], is_flag=True, default=None, help=text)
        elif field.name in LISTS:
            option = click.Option(
                [flag, field.name], metavar=f"{settings.metavar(field)},..", help=f"{text}; several are compared"
            )
        else:
            option = click.Option([flag, field.name], metavar=settings.metavar(field), help=text)
        command.params.append(option)
    return command


def own_options(command: Callable) -> Callable:
    """The options that only `sim` has."""
    for option in reversed(OWN):
        command = option(command)
    return command
