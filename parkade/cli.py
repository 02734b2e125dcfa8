"""The command `parkade`: its subcommands and their options. The options of `serve` are made from wire.config."""

import os
import shlex
import sys
from collections.abc import Callable

import click

from parkade.number import Real
from parkade.sim_options import own_options, sim_options
from wire import config as settings
from wire.config import FIELDS, ConfigError
from wire.messages import DEFAULT_PARK_S, MAX_PARK_S
from wire.service import flush_log, open_log

URL = "http://127.0.0.1:8080"
PLANNED = (
    "model", "ctx", "slots", "policy", "high", "low", "lookahead_steps", "park_mode", "park_ram", "draft", "dtype", "device",
    "gpu_memory", "exact", "no_reuse",
)  # fmt: skip


class OneLine(click.ClickException):
    """An error of the user: one line on stderr, exit status 1, no traceback."""

    def show(self, file: object = None) -> None:
        """Print it after what the log still holds."""
        flush_log()
        click.echo(f"error: {self.format_message()}", err=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="parkade")
def main() -> None:
    """Serve a language model and never drop a stream because the key-value cache is full."""


def setting_options(command: click.Command, names: tuple[str, ...]) -> click.Command:
    """Add one option for each setting of these names."""
    for field in FIELDS:
        if field.name not in names:
            continue
        flag, text = settings.flag_name(field.name), settings.help_text(field)
        if settings.is_switch(field):
            command.params.append(click.Option([flag, field.name], is_flag=True, default=None, help=text))
        else:
            command.params.append(click.Option([flag, field.name], metavar=settings.metavar(field), help=text))
    return command


@main.command(epilog="Every option is also a key of the TOML file and a variable PARKADE_...; an option wins over both.")
@click.option("--config", "config_file", metavar="FILE.toml", help="settings as TOML")
def serve(config_file: str | None, **flags: object) -> None:
    """Start the server: host cache, workers, router and HTTP adapter. Prints `ready URL` when it answers."""
    from parkade.serve import serve as run  # the others need none of its imports

    try:
        config = settings.load(flags, config_file)
        open_log("serve")
        status = run(config)
    except ConfigError as error:
        raise OneLine(str(error)) from None
    flush_log()
    sys.exit(status)


setting_options(serve, tuple(field.name for field in FIELDS))


def client_options(command: Callable) -> Callable:
    """Options of the commands that talk to a running server."""
    key = click.option("--api-key", envvar="PARKADE_API_KEY", default="", help="API key, where the server asks for one")
    url = click.option("--url", envvar="PARKADE_URL", default=URL, show_default=True, help="address of the server")
    return url(key(command))


@main.command()
@client_options
@click.option("--system", default="", help="system message")
@click.option("--max-tokens", type=click.IntRange(1), default=1024, show_default=True, help="tokens of one answer at most")
@click.option("--temperature", type=Real(0, 2), default=0.7, show_default=True)
@click.option("--seed", type=int, default=None, help="makes answers repeatable")
def chat(url: str, api_key: str, **options: object) -> None:
    """Talk to the model in the terminal."""
    from parkade.chat import chat as run

    _run(lambda: run(url, api_key, **options))


@main.command()
@client_options
def status(url: str, api_key: str) -> None:
    """Show what a running server does, once."""
    from parkade.status import status as run

    _run(lambda: run(url, api_key))


@main.command()
@client_options
@click.option("--every", "every_s", type=Real(0.1, 3600), default=0.5, show_default=True, help="seconds between looks")
def top(url: str, api_key: str, every_s: float) -> None:
    """Watch a running server: pool, slots, parked streams, budget. Ends with Ctrl-C."""
    from parkade.status import top as run

    _run(lambda: run(url, api_key, every_s))


@main.command()
@client_options
@click.argument("slot", type=click.IntRange(0))
@click.option("--deadline-s", type=Real(0, MAX_PARK_S, min_open=True), default=DEFAULT_PARK_S, show_default=True,
              help="seconds after which it comes back by itself")  # fmt: skip
def park(url: str, api_key: str, slot: int, deadline_s: float) -> None:
    """Set the request in SLOT (see `parkade status`) aside, until `parkade resume SLOT` or its deadline."""
    from parkade.hold import park as run

    _run(lambda: run(url, api_key, slot, deadline_s))


@main.command()
@client_options
@click.argument("slot", type=click.IntRange(0))
def resume(url: str, api_key: str, slot: int) -> None:
    """Let the request that was set aside in SLOT come back as soon as it fits."""
    from parkade.hold import resume as run

    _run(lambda: run(url, api_key, slot))


@main.command()
@client_options
@click.option("--streams", type=click.IntRange(1, 1024), default=4, show_default=True, help="streams at once")
@click.option("--prompt-tokens", type=click.IntRange(1), default=250, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=200, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True)
@click.option("--serve", "serve_flags", default=None, metavar="FLAGS", help='start a server for it, e.g. --serve "--ctx 2048"')
@click.option("--fit", default=None, metavar="FILE.json", help="instead, fit the simulator's costs to a server of its own")
def bench(url: str, api_key: str, serve_flags: str | None, fit: str | None, **options: int) -> None:
    """Measure a server: tokens a second, time to the first token, gaps between tokens, parks."""
    try:
        flags = None if serve_flags is None else shlex.split(serve_flags)
    except ValueError as error:
        raise OneLine(f"--serve {serve_flags!r}: {error}") from None
    if fit is not None:
        from parkade.fit import fit_server

        _run(lambda: fit_server(fit, flags or [], options["rounds"]))
    from parkade.bench import bench as run

    _run(lambda: run(url, api_key, flags, **options))


@main.command()
@click.option("--ctx", type=click.IntRange(16), default=2048, show_default=True, help="cells of the pool")
@click.option("--max-tokens", type=click.IntRange(1), default=700, show_default=True, help="tokens of each chat")
@click.option("--park-ram", default="auto", show_default=True, help="RAM for parked cells; 0 recomputes instead")
def demo(ctx: int, max_tokens: int, park_ram: str) -> None:
    """Run four chats that do not fit together through a server with a small pool; exit status 0 if all four are whole."""
    from parkade.demo import demo as run

    _run(lambda: run(ctx, max_tokens, park_ram))


@main.command()
@click.option(
    "--card-memory", default=None, metavar="SIZE", help="free memory of a card, e.g. 141GB: plan for cards of that size"
)
def plan(card_memory: str | None, **flags: object) -> None:
    """Say what a model needs and what fits, with the arithmetic, without starting anything. Exit status 1 if it does not fit."""
    from parkade.plan import plan as run

    try:
        card_bytes = None if card_memory is None else settings.size_bytes(card_memory)
        sys.exit(run(settings.load(flags), card_bytes))
    except ConfigError as error:
        raise OneLine(str(error)) from None


setting_options(plan, PLANNED)


@main.command()
@own_options
def sim(journal: str | None, **options: object) -> None:
    """Simulate: a trace through the real scheduler in virtual time. Or replay a journal of a real run."""
    from parkade.replay import replay_journal
    from parkade.simulate import simulate

    try:
        if journal is not None:
            _nothing_beside_the_journal()
        sys.exit(simulate(**options) if journal is None else replay_journal(journal))
    except ConfigError as error:
        raise OneLine(str(error)) from None


sim_options(sim)


@main.command()
@click.argument("file", type=click.Path(dir_okay=False))
def keygen(file: str) -> None:
    """Make a pair of CURVE keys for --listen, or for a client: the secret one goes to FILE, the public one is printed."""
    from wire.keys import new_pair

    public, secret = new_pair()
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as new:
            new.write(secret + b"\n")
    except OSError as error:
        raise OneLine(f"{file}: {error.strerror}") from None
    click.echo(public.decode())


@main.group()
def systemd() -> None:
    """Serve under systemd: install the units, or pack them."""


@systemd.command()
@click.option("--gpus", default=None, metavar="0,1", help="a worker for each of these cards [default: as the settings say]")
@click.option("--park-ram", default=None, metavar="8GiB", help="RAM for parked cells; memory limits follow it")
@click.option("--root", default="/", show_default=True, metavar="DIR", help="write below DIR, e.g. for an image")
@click.option("--python", default=None, metavar="PATH", help="what runs Parkade there [default: this one]")
@click.option("--check", is_flag=True, help="write nothing; show what differs, status 1 if anything does")
def install(**options: object) -> None:
    """Write the units, /etc/parkade/config.toml (if there is none) and the user's entry, once systemd has verified them."""
    from parkade.systemd import install as run

    _user(lambda: run(**options))


@systemd.command()
@click.argument("folder", default=".")
def deb(folder: str) -> None:
    """Pack the units as a Debian package in FOLDER. Parkade itself is not in it."""
    from parkade.systemd import deb as run

    _user(lambda: run(folder))


@systemd.command("wait-drained", hidden=True)
@click.option("--config", "config_file", metavar="FILE.toml")
def wait_drained(config_file: str | None) -> None:
    """Return when the router has drained; at once if it does not drain."""
    from parkade.systemd import wait_drained as run

    _user(lambda: run(settings.load({}, config_file)))


def _user(command: Callable[[], int]) -> None:
    """Run a command of this machine: a mistake in its settings is one line, and so is a file that cannot be written."""
    try:
        sys.exit(command())
    except ConfigError as error:
        raise OneLine(str(error)) from None
    except OSError as error:
        raise OneLine(": ".join(filter(None, (error.filename, error.strerror)))) from None


def _nothing_beside_the_journal() -> None:
    """ConfigError for any other option: a journal has its settings in it."""
    context = click.get_current_context()
    for option in context.command.params:
        given = context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE
        if given and option.name != "journal":
            raise ConfigError(f"--journal brings its own settings; leave {option.opts[0]} out")


def _run(command: Callable[[], int | None]) -> None:
    """Run a client's command: errors of the server or the line are one line."""
    from parkade.api import ApiError

    try:
        status = command() or 0
    except ApiError as error:
        raise OneLine(str(error)) from None
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `parkade status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
