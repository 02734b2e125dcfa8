"""Settings: what wins over what, and the one line that a wrong one gets."""

from pathlib import Path

import pytest

from wire.config import (
    FIELDS,
    Config,
    ConfigError,
    as_environ,
    device_of,
    devices,
    draft_length,
    env_name,
    flag_name,
    load,
    metavar,
    size_bytes,
)


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('ctx = 512\nslots = 3\nport = 1\n"max-queued" = 9\n')
    config = load({"ctx": "2048", "slots": None}, str(file), {"PARKADE_CTX": "1024", "PARKADE_SLOTS": "5"})
    assert (config.ctx, config.slots, config.port, config.max_queued, config.high) == (2048, 5, 1, 9, 94)


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('park_ram = "16MiB"\nno_reuse = true\n')
    config = load({}, None, {"PARKADE_CONFIG": str(file)})
    assert (config.park_ram, config.no_reuse) == ("16MiB", True)


@pytest.mark.parametrize(
    "config",
    [
        Config(),
        Config(
            no_reuse=True,
            ctx=64,
            drain_s=0.5,
            park_ram="0",
            model="a b=c",
            device="cpu,cpu",
            gpu_memory=0.5,
            exact="off",
            draft="3",
        ),
    ],
)
def test_children_get_the_same_settings_through_the_environment(config: Config) -> None:
    assert load({}, None, as_environ(config)) == config


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"ctx": "many"}, "--ctx 'many'"),
        ({"ctx": "8"}, "--ctx 8 must be at least 16, or 0"),
        ({"ctx": "-1"}, "--ctx '-1'"),
        ({"gpu_memory": "0"}, "--gpu-memory '0'"),
        ({"gpu_memory": "1.5"}, "--gpu-memory '1.5'"),
        ({"policy": "hope"}, "--policy 'hope'"),
        ({"high": "80", "low": "80"}, "--low 80 must be below --high 80"),
        ({"park_ram": "lots"}, "--park-ram 'lots'"),
        ({"park_ram": "-1"}, "--park-ram '-1'"),
        ({"device": "cpu,tpu"}, "--device 'tpu'"),
        ({"device": "cuda:x"}, "--device 'cuda:x'"),
        ({"device": ""}, "--device ''"),
        ({"device": "auto,cpu"}, "--device 'auto'"),
        ({"device": "cuda:1,cuda:1"}, "cuda:1 is named twice"),
        ({"draft": "9"}, "--draft '9' must be auto or a number from 0 to 8"),
        ({"draft": "-1"}, "--draft '-1'"),
        ({"draft": ""}, "--draft ''"),
        ({"draft": "two"}, "--draft 'two'"),
        ({"draft": "\u0662"}, "--draft"),
        ({"port": "70000"}, "--port '70000'"),
        ({"drain_s": "nan"}, "--drain-s 'nan'"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(flags, None, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_is_named_too() -> None:
    with pytest.raises(ConfigError, match="--slots 'x'"):
        load({}, None, {"PARKADE_SLOTS": "x"})


def test_an_unknown_choice_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="--policy 'eager' is not known; choose one of watermark, lookahead, ondemand, off$"):
        load({"policy": "eager"}, None, {})


@pytest.mark.parametrize(
    ("text", "words"),
    [("ctx = ", "--config"), ("speed = 3", "unknown key 'speed'"), ('ctx = "a"', "--ctx 'a'"), (None, "No such file")],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "config.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load({}, str(file), {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("16MiB", 16 << 20), ("8gib", 8 << 30), ("1.5 kb", 1500), ("2G", 2 * 10**9), ("7B", 7)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert size_bytes(text) == nbytes


def test_each_device_has_a_worker_with_a_name() -> None:
    assert devices("auto") == {"worker0": "auto"}
    assert devices("cpu, cpu") == {"cpu0": "cpu", "cpu1": "cpu"}
    assert devices("cuda") == {"cuda0": "cuda:0"}
    assert devices("cuda:1,cpu,cuda:0") == {"cuda1": "cuda:1", "cpu0": "cpu", "cuda0": "cuda:0"}


def test_a_worker_finds_its_device_by_its_name() -> None:
    assert device_of("cuda1", "cuda:0,cuda:1") == "cuda:1"
    assert device_of("whatever", "auto") == "auto"  # as a service manager calls it
    assert device_of("cpu0", "cuda:3") == "cuda:3"
    with pytest.raises(ConfigError, match="no worker of it is named cuda2; choose one of cuda0, cuda1$"):
        device_of("cuda2", "cuda:0,cuda:1")


def test_a_pool_of_as_many_cells_as_fit() -> None:
    assert load({"ctx": "0"}, None, {}).ctx == 0


def test_what_the_help_shows_for_a_value() -> None:
    shown = {field.name: metavar(field) for field in FIELDS}
    assert (shown["gpu_memory"], shown["drain_s"], shown["ctx"], shown["exact"]) == ("SHARE", "SECONDS", "N", "on|off")


def test_draft(tmp_path: Path) -> None:
    assert [draft_length(text) for text in ("auto", "0", "8")] == [None, 0, 8]
    file = tmp_path / "config.toml"
    file.write_text("draft = 3\n")
    assert load({}, str(file), {}).draft == "3"
    file.write_text("draft = true\n")
    with pytest.raises(ConfigError, match="--draft True"):
        load({}, str(file), {})


def test_the_names_that_others_script_against() -> None:
    wanted = (
        "model ctx slots policy high low park-ram resume-order park-every no-reuse exact max-queued draft device gpu-memory "
        "dtype host port run-dir drain-s api-key-file"
    )
    flags = {flag_name(field.name) for field in FIELDS}
    assert {f"--{name}" for name in wanted.split(" ")} <= flags
    assert env_name("park_ram") == "PARKADE_PARK_RAM"
    assert (Config().high, Config().low) == (94, 80)
