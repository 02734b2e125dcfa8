"""The units for systemd: systemd itself finds nothing to say about them, they are closed, and they follow the settings."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from parkade import systemd
from parkade.cli import main
from parkade.systemd import verify
from parkade.units import OLDEST, PYTHON, SINCE, WORKER, Machine, sources, units, with_settings
from wire.config import Config, ConfigError, load

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
SETTINGS = load({}, str(ROOT / "systemd" / "config.toml"), {})
SERVICES = ("parkade-hostcache.service", "parkade-router.service", "parkade-openai.service", WORKER)
# What `systemd-analyze security` may say at most, in tenths (--threshold).
SCORES = {"parkade-hostcache.service": 10, "parkade-router.service": 15, "parkade-openai.service": 15, WORKER: 25}
needs_systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here (apt install systemd)")


def made(machine: Machine | None = None, **settings: object) -> dict[str, str]:
    return units(replace(SETTINGS, **settings), machine or Machine())


def value(text: str, key: str) -> str:
    (found,) = re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)
    return found


KINDS = {
    "as they are": sources(),
    "cpu": made(Machine(memory_bytes=16 * GIB)),
    "guests": made(listen="tcp://10.0.0.1:5555"),
    "cards": made(Machine(memory_bytes=16 * GIB), device="cuda:0,cuda:1", park_ram="8GiB"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_service_says_what_it_needs_in_its_own_text(kind: str) -> None:
    assert tuple(sorted(name for name in KINDS[kind] if name.endswith(".service"))) == tuple(sorted(SERVICES))
    for name in SERVICES:
        text = KINDS[kind][name]
        assert (value(text, "Type"), value(text, "Restart"), value(text, "KillMode")) == ("notify", "always", "mixed")
        assert int(value(text, "WatchdogSec")) >= 10
        assert value(text, "PartOf") == "parkade.target"
        assert value(text, "Slice") == "parkade.slice"
        assert text.index("[Unit]") < text.index("[Service]") < text.index("[Install]")
    started = {value(KINDS[kind][name], "ExecStart").split()[2] for name in SERVICES}
    assert started == {"hostcache", "router", "gpu_worker", "router.openai"}


@needs_systemd
@pytest.mark.parametrize("kind", KINDS)
def test_systemd_finds_nothing_to_say(kind: str) -> None:
    assert verify(KINDS[kind]) == ""


@needs_systemd
def test_a_typo_is_found() -> None:
    texts = dict(KINDS["cpu"])
    texts["parkade-router.service"] = texts["parkade-router.service"].replace("WatchdogSec", "WatchDogSec")
    assert "WatchDogSec" in verify(texts)


@needs_systemd
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SERVICES)
def test_they_are_closed(kind: str, name: str, tmp_path: Path) -> None:
    unit = tmp_path / name.replace("@.", "@cpu0.")
    unit.write_text(KINDS[kind][name].replace(PYTHON, sys.executable))
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager", f"--threshold={SCORES[name]}", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout.splitlines()[-1:] + [done.stderr]


def test_a_worker_without_a_card_cannot_reach_one_and_one_with_cards_can() -> None:
    closed, open_ = KINDS["cpu"][WORKER], KINDS["cards"][WORKER]
    assert value(closed, "PrivateDevices") == value(closed, "PrivateUsers") == "yes"
    assert not re.search(r"^(DeviceAllow|LimitMEMLOCK|ExecStartPre)=", closed, re.MULTILINE)
    assert value(open_, "PrivateDevices") == "no"
    assert value(open_, "LimitMEMLOCK") == "infinity"
    assert value(open_, "ExecStartPre").endswith("nvidia-modprobe -u -c 0 -c 1")
    assert re.findall(r"^DeviceAllow=char-(\S+) rw$", open_, re.MULTILINE) == [
        "nvidia", "nvidia-frontend", "nvidiactl", "nvidia-uvm", "nvidia-caps",
    ]  # fmt: skip


def test_a_host_cache_may_look_at_the_arena_that_it_gets_back() -> None:
    calls = re.findall(r"^SystemCallFilter=(.*)$", KINDS["cpu"]["parkade-hostcache.service"], re.MULTILINE)
    assert "mincore" in calls[-1].split(), "its second life would end at once, again and again"


def test_each_device_has_its_worker() -> None:
    assert "Wants=parkade-gpu-worker@cuda0.service parkade-gpu-worker@cuda1.service" in KINDS["cards"]["parkade.target"]
    assert "cpu0" not in KINDS["cards"]["parkade.target"]
    assert "Wants=parkade-gpu-worker@cpu0.service" in KINDS["cpu"]["parkade.target"]


def test_memory_follows_the_budget() -> None:
    cache = KINDS["cards"]["parkade-hostcache.service"]
    assert (int(value(cache, "MemoryMax")), int(value(cache, "MemoryLow"))) == (8 * GIB + (512 << 20), 8 * GIB)
    assert value(cache, "MemorySwapMax") == "0"
    with pytest.raises(ConfigError, match="park_ram 15GiB"):
        made(Machine(memory_bytes=16 * GIB), park_ram="15GiB")


def test_the_worker_dies_first_and_the_router_last() -> None:
    order = sorted(SERVICES, key=lambda name: -int(value(KINDS["cpu"][name], "OOMScoreAdjust")))
    assert order == [WORKER, "parkade-openai.service", "parkade-hostcache.service", "parkade-router.service"]


def test_a_drain_has_the_time_that_the_settings_give_it() -> None:
    for name, text in made(drain_s=99.5).items():
        if name in (WORKER, "parkade-router.service", "parkade-openai.service"):
            assert int(value(text, "TimeoutStopSec")) > 100 + 10, name


def test_a_worker_stops_when_the_router_has_drained() -> None:
    worker = KINDS["cpu"][WORKER]
    assert "wait-drained" in value(worker, "ExecStop")
    assert "parkade-router" not in value(worker, "After"), "it would stop before the router"
    assert "parkade-gpu-worker" not in value(KINDS["cpu"]["parkade-router.service"], "After"), "it would wait for the model"
    assert "parkade-hostcache.service" in value(worker, "After"), "else the images would go before those that read them"


@pytest.mark.parametrize(
    ("settings", "address"),
    [
        ({}, "127.0.0.1:8080"),
        ({"host": "localhost"}, "127.0.0.1:8080"),
        ({"host": "::1", "port": 80}, "[::1]:80"),
        ({"host": "0.0.0.0"}, "0.0.0.0:8080"),
        ({"host": "::"}, "8080"),
    ],
)
def test_http_listens_where_the_settings_say(settings: dict, address: str) -> None:
    assert value(made(**settings)["parkade-openai.socket"], "ListenStream") == address


def test_the_router_has_a_network_only_where_guests_come_over_tcp() -> None:
    closed, open_ = KINDS["cpu"]["parkade-router.service"], KINDS["guests"]["parkade-router.service"]
    assert (value(closed, "PrivateNetwork"), value(closed, "RestrictAddressFamilies")) == ("yes", "AF_UNIX")
    assert (value(open_, "PrivateNetwork"), value(open_, "RestrictAddressFamilies")) == ("no", "AF_UNIX AF_INET AF_INET6")
    assert "IPAddressDeny" not in open_


@pytest.mark.parametrize("settings", [{"run_dir": "/tmp/x"}, {"port": 0}, {"device": "disk"}])
def test_settings_that_cannot_be_served_are_refused(settings: dict) -> None:
    with pytest.raises(ConfigError):
        made(**settings)


def test_what_newer_systemd_has_is_rendered_by_version() -> None:
    for version, lines in SINCE.items():
        for name, settings in lines.items():
            for setting in settings:
                assert setting not in made(Machine(systemd=version - 1))[name].splitlines()
                assert setting in made(Machine(systemd=version))[name].splitlines()
    assert min(SINCE) > OLDEST


def test_settings_that_are_there_stay() -> None:
    text = '# mine\npark_ram = "auto"  # as told\nctx = 64\n# device = "cpu"\n'
    text = with_settings(text, {"park_ram": "1GiB", "device": "cuda:0"})
    assert text == '# mine\npark_ram = "1GiB"  # as told\nctx = 64\n# device = "cpu"\ndevice = "cuda:0"\n'


# the command ----------------------------------------------------------------------------------------------------------
def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["systemd", *map(str, arguments)])
    return done.exit_code, done.output


def test_install_writes_all_of_it_and_check_finds_what_differs(tmp_path: Path) -> None:
    status, said = command("install", "--root", tmp_path, "--park-ram", "64MiB", "--python", PYTHON)
    assert (status, "systemctl enable --now parkade.target" in said) == (0, True), said
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    names = {f"etc/systemd/system/{name}" for name in sources()}
    assert there == names | {"etc/parkade/config.toml", "etc/sysusers.d/parkade.conf"}
    assert command("install", "--root", tmp_path, "--python", PYTHON, "--check")[0] == 0
    unit = tmp_path / "etc/systemd/system/parkade-router.service"
    unit.write_text(unit.read_text().replace("WatchdogSec=10", "WatchdogSec=100"))
    status, said = command("install", "--root", tmp_path, "--python", PYTHON, "--check")
    assert (status, "-WatchdogSec=100" in said) == (1, True)
    assert "WatchdogSec=100" in unit.read_text(), "--check must write nothing"


def test_install_keeps_the_settings_and_resolves_auto(tmp_path: Path) -> None:
    path = tmp_path / "etc/parkade/config.toml"
    path.parent.mkdir(parents=True)
    path.write_text('run_dir = "/run/parkade"\nctx = 4096  # mine\n')
    assert command("install", "--root", tmp_path, "--gpus", "1,3")[0] == 0
    config = load({}, str(path), {})
    assert (config.ctx, config.device, "# mine" in path.read_text()) == (4096, "cuda:1,cuda:3", True)
    assert config.park_ram.endswith("MiB"), "the host cache would take a share of its own limit"
    target = (tmp_path / "etc/systemd/system/parkade.target").read_text()
    assert "worker@cuda1.service parkade-gpu-worker@cuda3.service" in target


@pytest.mark.parametrize(
    "arguments", [["--gpus", "all"], ["--park-ram", "lots"], ["--park-ram", "900TiB"], ["--park-ram", r"\9GiB"]]
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path: Path, arguments: list[str]) -> None:
    status, said = command("install", "--root", tmp_path, *arguments)
    assert (status, said.startswith("error: "), said.count("\n")) == (1, True, 1)
    assert not list(tmp_path.iterdir())


def test_the_services_can_read_their_settings_whatever_the_umask(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        assert command("install", "--root", tmp_path / "image")[0] == 0
    finally:
        os.umask(umask)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("image/**/") if path != tmp_path}
    assert modes == {0o755}
    assert stat.S_IMODE((tmp_path / "image/etc/parkade/config.toml").stat().st_mode) == 0o644


def test_files_that_are_no_text_are_one_line_or_a_difference(tmp_path: Path) -> None:
    assert command("install", "--root", tmp_path)[0] == 0
    unit, settings = tmp_path / "etc/systemd/system/parkade.target", tmp_path / "etc/parkade/config.toml"
    unit.write_bytes(b"\xff\n")
    assert command("install", "--root", tmp_path, "--check")[0] == 1
    settings.write_bytes(b"\xff\n")
    status, said = command("install", "--root", tmp_path)
    assert (status, said.startswith("error: "), said.count("\n")) == (1, True, 1)


def test_nothing_is_written_that_systemd_speaks_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd, "verify", lambda _: "Unknown key name")
    assert command("install", "--root", tmp_path)[0] == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("dpkg-deb"), reason="no dpkg-deb here")
def test_the_package_has_the_units_and_nothing_else(tmp_path: Path) -> None:
    assert command("deb", tmp_path)[0] == 0
    (package,) = tmp_path.iterdir()
    listed = subprocess.run(["dpkg-deb", "-c", package], capture_output=True, text=True, check=True).stdout
    files = {line.split()[-1] for line in listed.splitlines() if line.startswith("-")}
    expected = {f"./usr/lib/systemd/system/{name}" for name in sources()}
    assert files == expected | {"./usr/lib/sysusers.d/parkade.conf", "./etc/parkade/config.toml"}
    assert set(re.findall(r" (\S+/\S+) ", listed)) == {"root/root"}


def test_the_shipped_settings_are_settings() -> None:
    assert isinstance(SETTINGS, Config)
    assert (SETTINGS.run_dir, SETTINGS.device) == ("/run/parkade", "cpu")
