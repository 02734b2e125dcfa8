"""The units under a real systemd, booted in a container: install, serve, SIGKILL and restart of each unit under load, drain.

Not shown here: limits of memory (the container's groups do not have them) and cards. Streams are checked against the oracle.
"""

import signal
import socket
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner

from gpu_worker.model.load import load_model
from gpu_worker.model.toy import Oracle
from parkade.cli import main
from tests.system.container import PYTHON, Container, Unavailable
from tests.system.stack import Answer, prompt_ids, stream, together
from wire.messages import Sampling
from wire.model_files import find_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

CACHE, ROUTER, HTTP = "parkade-hostcache.service", "parkade-router.service", "parkade-openai.service"
WORKER = "parkade-gpu-worker@cpu0.service"
UNITS = (CACHE, ROUTER, HTTP, WORKER)
PROMPT, GENERATED = 100, 1500
MID = 20  # tokens of a stream when something happens to it; the toy model is fast


class Machine(Container):
    """A container in which parkade.target is served."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def serving(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def act(self, verb: str, *units: str) -> None:
        """A verb of systemctl; it returns before it is done."""
        assert not self.run("systemctl", "--no-block", verb, *units)

    def kill(self, unit: str, how: int = signal.SIGKILL) -> None:
        assert not self.run("systemctl", "kill", "--kill-whom=main", f"--signal={how}", unit)

    def pid(self, unit: str) -> int:
        return int(self.shown(unit, "MainPID"))

    def again(self, unit: str, former: int) -> None:
        """Wait for the unit's next life, and until everything is served."""
        self.until(lambda: self.pid(unit) not in (0, former) and self.shown(unit, "ActiveState") == "active", f"{unit} is back")
        self.until(self.serving, "served")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    try:
        machine = Machine(tmp_path_factory.mktemp("container"))
    except Unavailable as error:
        pytest.skip(str(error))
    with machine:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            machine.port = probe.getsockname()[1]
        settings = machine.root / "etc/parkade/config.toml"
        settings.parent.mkdir()
        lines = ('run_dir = "/run/parkade"', 'model = "toy"', 'device = "cpu"', "ctx = 8192", f"port = {machine.port}")
        settings.write_text("\n".join(lines) + "\n")
        arguments = ["systemd", "install", "--root", str(machine.root), "--python", PYTHON, "--park-ram", "256MiB"]
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == 0, done.output
        machine.run("systemd-sysusers")
        machine.run("systemctl", "daemon-reload")
        assert not machine.run("systemctl", "start", "parkade.target")
        machine.until(machine.serving, "served")
        yield machine


@pytest.fixture(scope="module")
def expected() -> dict[int, list[int]]:
    model = load_model(find_model("toy"))
    return {number: Oracle(model, prompt_ids(number, PROMPT)).text(GENERATED, Sampling(temperature=0)) for number in range(4)}


def load(machine: Machine, happens, count: int = 4) -> list[Answer]:
    """Streams, during the first of which something happens, once."""
    happened = []

    def look(answer: Answer) -> None:
        if len(answer.ids) >= MID and not happened:
            happened.append(True)
            happens()

    def one(number: int):
        on_tokens = look if number == 0 else None
        return stream(machine.url, prompt=prompt_ids(number, PROMPT), max_tokens=GENERATED, temperature=0, on_tokens=on_tokens)

    answers = together(*(one(number) for number in range(count)), timeout_s=300)
    assert happened
    return answers


def whole(answers: list[Answer], expected: dict[int, list[int]]) -> None:
    """Every stream ended as promised, with the text of a run that nothing happened to."""
    for number, answer in enumerate(answers):
        assert (answer.error, answer.finish_reason, answer.done) == (None, "length", True), number
        assert answer.ids == expected[number], number


def test_everything_is_started_and_nobody_complains(machine: Machine, expected: dict) -> None:
    whole(load(machine, lambda: None), expected)
    for unit in UNITS:
        assert (machine.shown(unit, "ActiveState"), machine.shown(unit, "NRestarts")) == ("active", "0")
        assert machine.shown(unit, "StatusText") or unit == WORKER
        assert machine.shown(unit, "User") == "parkade"
    assert machine.shown(CACHE, "NFileDescriptorStore") == "1"


@pytest.mark.parametrize("unit", [WORKER, CACHE])
@pytest.mark.parametrize("how", ["kill", "restart"])
def test_a_worker_or_the_host_cache_goes_and_no_stream_notices(machine: Machine, expected: dict, unit: str, how: str) -> None:
    former = machine.pid(unit)
    whole(load(machine, lambda: machine.kill(unit) if how == "kill" else machine.act("restart", unit)), expected)
    machine.again(unit, former)


@pytest.mark.parametrize("how", ["kill", "restart"])
def test_an_image_outlives_the_host_cache(machine: Machine, expected: dict, how: str) -> None:
    former = machine.pid(CACHE)
    attached = machine.journal(WORKER).count("1 leases kept")

    def parked_meanwhile() -> None:
        seats: list[int] = []

        def seated() -> bool:
            listed = httpx.get(machine.url + "/slots").json()
            seats[:] = [slot["id"] for slot in listed if slot["state"] != "idle"]
            return bool(seats)

        machine.until(seated, "the request has a seat")
        (slot,) = seats
        assert httpx.post(f"{machine.url}/slots/{slot}/park", json={}, timeout=60).status_code == 200
        machine.kill(CACHE) if how == "kill" else machine.act("restart", CACHE)
        machine.until(lambda: machine.journal(WORKER).count("1 leases kept") > attached, "the lease is claimed")
        assert httpx.post(f"{machine.url}/slots/{slot}/resume", json={}, timeout=60).status_code == 200

    answers = load(machine, parked_meanwhile, count=1)
    whole(answers, expected)
    assert (answers[0].parkade["parks"], answers[0].parkade["recomputed_tokens"]) == (1, 0)
    machine.again(CACHE, former)


@pytest.mark.parametrize("unit", [ROUTER, HTTP])
def test_a_restart_of_the_router_or_the_adapter_lets_streams_end(machine: Machine, expected: dict, unit: str) -> None:
    former = machine.pid(unit)
    whole(load(machine, lambda: machine.act("restart", unit)), expected)
    machine.again(unit, former)
    whole(load(machine, lambda: None, count=1), expected)


@pytest.mark.parametrize("unit", [ROUTER, HTTP])
def test_a_killed_router_or_adapter_ends_its_streams_and_is_back(machine: Machine, expected: dict, unit: str) -> None:
    former = machine.pid(unit)
    try:
        for answer in load(machine, lambda: machine.kill(unit)):
            assert answer.error or not answer.done, "a stream that lost its router cannot have ended well"
    except httpx.TransportError:
        assert unit == HTTP
    machine.again(unit, former)
    whole(load(machine, lambda: None), expected)


def test_a_host_cache_that_hangs_is_killed_and_started_again(machine: Machine, expected: dict) -> None:
    former = machine.pid(CACHE)
    whole(load(machine, lambda: machine.kill(CACHE, signal.SIGSTOP)), expected)
    machine.until(lambda: "watchdog" in machine.journal(CACHE).lower(), "the watchdog bites")
    machine.again(CACHE, former)


def test_everything_is_killed_at_once(machine: Machine, expected: dict) -> None:
    former = {unit: machine.pid(unit) for unit in UNITS}
    for unit in UNITS:
        machine.kill(unit)
    for unit in UNITS:
        machine.again(unit, former[unit])
    whole(load(machine, lambda: None), expected)


def test_a_storm_of_kills_locks_nobody_out(machine: Machine, expected: dict) -> None:
    for unit in (ROUTER, HTTP, CACHE):
        for _ in range(12):
            former = machine.pid(unit)
            machine.kill(unit)
            machine.until(lambda unit=unit, former=former: machine.pid(unit) not in (0, former), f"{unit} is back")
    machine.until(machine.serving, "served")
    whole(load(machine, lambda: None), expected)


@pytest.mark.parametrize("unit", [ROUTER, HTTP])
def test_a_reload_costs_nobody_anything(machine: Machine, expected: dict, unit: str) -> None:
    former = machine.pid(unit)
    whole(load(machine, lambda: machine.act("reload", unit)), expected)
    assert machine.pid(unit) == former


def test_a_restart_of_the_target_under_load(machine: Machine, expected: dict) -> None:
    former = {unit: machine.pid(unit) for unit in UNITS}
    whole(load(machine, lambda: machine.act("restart", "parkade.target")), expected)
    for unit in UNITS:
        machine.again(unit, former[unit])


def test_a_stop_drains_and_leaves_nothing(machine: Machine, expected: dict) -> None:
    whole(load(machine, lambda: machine.act("stop", "parkade.target")), expected)
    for unit in ("parkade.target", "parkade-router.socket", "parkade-openai.socket", *UNITS):
        machine.until(lambda unit=unit: machine.shown(unit, "ActiveState") == "inactive", f"{unit} has stopped")
        assert machine.shown(unit, "Result") in ("success", "")
    assert machine.shown(CACHE, "NFileDescriptorStore") == "0"
    assert machine.run("ls", "-A", "/run/parkade").split() in ([], ["hostcache.sock"])
    assert not machine.run("ls", "-A", "/dev/shm")
    assert "python" not in machine.run("sh", "-c", "cat /proc/[0-9]*/comm")
    assert not machine.run("systemctl", "list-units", "--failed", "--no-legend")


def test_the_package_is_installed_and_removed(machine: Machine) -> None:
    done = CliRunner().invoke(main, ["systemd", "deb", str(machine.root / "root")])
    assert done.exit_code == 0, done.output
    (package,) = (machine.root / "root").glob("*.deb")
    said = machine.run("dpkg", "--force-confold", "-i", f"/root/{package.name}")
    assert "Setting up parkade-units" in said and "error" not in said, said
    shipped = machine.root / "usr/lib/systemd/system/parkade-router.service"
    assert shipped.exists()
    assert machine.shown(ROUTER, "FragmentPath") == f"/etc/systemd/system/{ROUTER}", "what is installed for the machine wins"
    said = machine.run("dpkg", "-r", "parkade-units")
    assert "Removing parkade-units" in said and "error" not in said, said
    assert not shipped.exists()
