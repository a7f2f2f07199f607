"""Settings: which source wins, what is refused and how it is said, and what the data directory must be like."""

from __future__ import annotations

import os
import re
import stat
import traceback
from pathlib import Path
from typing import Any

import pytest
from modules import ROOT

from ssmd.cli import options
from ssmd.cli.usable_settings import usable
from ssmd.config import Origin, Settings, SettingsError, origin, variables
from ssmd.daemon import place
from ssmd.machine.variables import OF_TESTS, OTHERS, PREFIX


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.upper().startswith("SSMD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg-config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg-data"))


def write_file(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def refusal(**flags: Any) -> str:
    with pytest.raises(SettingsError) as caught:
        Settings(**flags)
    return str(caught.value)


def test_flags_win_over_environment_over_file_over_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(
        "SSMD_CONFIG", str(write_file(tmp_path / "s.toml", "port = 1\nmax_queue = 2\nmax_running = 3\n"))
    )
    monkeypatch.setenv("SSMD_PORT", "10")
    monkeypatch.setenv("SSMD_MAX_QUEUE", "20")
    settings = Settings(port=100, max_queue=None)
    assert (settings.port, settings.max_queue, settings.max_running, settings.runtime) == (100, 20, 3, "auto")


def test_the_platforms_own_file_is_read_without_ssmd_config(tmp_path: Path) -> None:
    file = tmp_path / "xdg-config" / "ssmd" / "config.toml"
    if os.name != "posix" or os.uname().sysname == "Darwin":
        pytest.skip("XDG directories are Linux's")
    write_file(file, 'log_level = "DEBUG"\nallowed_hosts = ["a.example", "b.example"]\n')
    settings = Settings()
    assert settings.log_level == "debug"
    assert settings.allowed_hosts[-2:] == ("a.example", "b.example")


def test_models_lie_in_the_data_directory_unless_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSMD_DATA_DIR", str(tmp_path / "d"))
    assert Settings().models_dir == tmp_path / "d" / "models"
    monkeypatch.setenv("SSMD_MODELS_DIR", "~/m")
    assert Settings().models_dir == Path.home() / "m"
    assert Settings(data_dir="relative").data_dir == Path.cwd() / "relative"


def test_aliases_are_a_table_of_the_file_or_a_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = 'port = 1\n[aliases]\n"claude-*" = "granite"\n"gpt-5" = "smollm2@litert"\n"*" = "smollm2"\n'
    monkeypatch.setenv("SSMD_CONFIG", str(write_file(tmp_path / "s.toml", text)))
    assert Settings().aliases == ("claude-*=granite", "gpt-5=smollm2@litert", "*=smollm2")
    monkeypatch.setenv("SSMD_ALIASES", "b = c, *=a")
    assert Settings().aliases == ("b=c", "*=a")


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ('"gpt-5" = 5', "'gpt-5': expected a line such as"),
        ('"a=b" = "c"', "'a=b': expected a line such as"),
        ('"*" = "a"\n"gpt-5" = "b"', "'gpt-5=b' would never be used: '*=a' comes first"),
        ('"gpt 5" = "a"', "a name has 1 to 128 printable ASCII characters"),
    ],
)
def test_wrong_alias_of_the_file_is_refused_at_start(
    table: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write_file(tmp_path / "s.toml", f"[aliases]\n{table}\n")
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    said = refusal()
    assert said.startswith(f"'aliases' in {file} = ")
    assert why in said
    assert "\n" not in said


def test_lists_in_the_environment_are_comma_separated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_ALLOWED_ORIGINS", "https://Chat.example:443/, http://[::1]:3000")
    assert Settings().allowed_origins == ("https://chat.example", "http://[::1]:3000")
    apps = "app://obsidian.md,tauri://localhost,vscode-webview://1abcD,chrome-extension://abcdefgh,file://"
    monkeypatch.setenv("SSMD_ALLOWED_ORIGINS", apps)
    assert Settings().allowed_origins == tuple(apps.split(","))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("http://*.example.com", "has a star for a part of an origin"),
        ("https://*", "has a star for a part of an origin"),
        ("http://localhost:*", "has a star for a part of an origin"),
        ("app://*", "has a star for a part of an origin"),
        ("https://a b.example", "is not an origin"),
        ("https://chat_.example,https://-", "'https://-' is not an origin"),
        ("https://300.1.1.1", "is not an origin"),
        ("https://chat.example/path", "is not an origin"),
    ],
)
def test_an_origin_that_no_browser_sends(given: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_ALLOWED_ORIGINS", given)
    message = refusal()
    assert said in message
    assert "SSMD_ALLOWED_ORIGINS" in message
    assert "\n" not in message


def test_sampling_defaults_come_from_all_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_file(tmp_path / "s.toml", 'default = ["temperature=0.1", "top_k=4"]\n')
    monkeypatch.setenv("SSMD_CONFIG", str(file))

    def values(**flags: Any) -> dict[str, Any]:
        return {name: default.value for name, default in Settings(**flags).defaults.items()}

    assert values() == {"temperature": 0.1, "top_k": 4}
    monkeypatch.setenv("SSMD_DEFAULT", "temperature=0.7, top_p=0.9")
    assert values() == {"temperature": 0.7, "top_p": 0.9}
    assert values(default=["temperature=0.3", "temperature=0.4"]) == {"temperature": 0.4}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("localhost", "127.0.0.1", "[::1]")),
        ({"host": "192.168.7.5"}, ("localhost", "127.0.0.1", "[::1]", "192.168.7.5")),
        ({"host": "[FE80::1]"}, ("localhost", "127.0.0.1", "[::1]", "[fe80::1]")),
        ({"host": "0.0.0.0"}, ("localhost", "127.0.0.1", "[::1]", "*")),
        ({"host": "::", "allowed_hosts": "Box.lan."}, ("localhost", "127.0.0.1", "[::1]", "box.lan")),
    ],
)
def test_allowed_hosts(flags: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert tuple(h.lower() for h in Settings(**flags).allowed_hosts) == expected


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"port": 70000}, ("--port", "70000", "65535")),
        ({"port": "http"}, ("--port", "'http'", "integer")),
        ({"threads": 0}, ("--threads", "0", "1")),
        ({"default": ["top_k=4", "temperature=3"]}, ("--default", "'top_k=4, temperature=3'", "from 0 to 2")),
        ({"threads": 512}, ("--threads", "512", "256")),
        ({"max_running": -1}, ("--max-running", "-1")),
        ({"max_body_bytes": float("nan")}, ("--max-body-bytes", "nan")),
        ({"log_level": "loud"}, ("--log-level", "loud", "debug")),
        ({"runtime": "../x"}, ("--runtime", "../x")),
        ({"host": "http://127.0.0.1"}, ("--host", "http://", "without scheme")),
        ({"host": "127.0.0"}, ("--host", "127.0.0")),
        ({"host": ""}, ("--host",)),
        ({"allowed_hosts": "a.example:80"}, ("--allowed-hosts", "a.example:80")),
        ({"allowed_origins": "chat.example"}, ("--allowed-origins", "chat.example")),
        ({"allowed_origins": "https://u@chat.example"}, ("--allowed-origins",)),
        ({"allowed_origins": "https://chat.example:99999"}, ("--allowed-origins",)),
        ({"allowed_origins": "app://a/b"}, ("--allowed-origins", "app://a/b")),
        ({"allowed_origins": "null"}, ("--allowed-origins",)),
        ({"allowed_origins": "*"}, ("--allowed-origins", "api_key")),
        ({"data_dir": "a\0b"}, ("--data-dir",)),
        ({"prot": 1}, ("--prot", "no such setting", "port")),
        ({"default": ["temperature=3"]}, ("--default", "temperature is 3.0", "from 0 to 2")),
        ({"default": ["temperatur=1"]}, ("--default", "no option 'temperatur'; did you mean temperature?")),
        ({"default": "warm"}, ("--default", "'warm' is not NAME=VALUE")),
    ],
)
def test_a_refused_flag_is_named_with_its_value(flags: dict[str, Any], said: tuple[str, ...]) -> None:
    message = refusal(**flags)
    assert all(part in message for part in said), message
    assert "\n" not in message


def test_a_refused_variable_and_file_key_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_file(tmp_path / "s.toml", "max_queue = -5\n")
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    monkeypatch.setenv("SSMD_PORT", "-1")
    message = refusal()
    assert "SSMD_PORT = '-1'" in message
    assert f"'max_queue' in {file}" in message
    assert "'-5'" in message


def test_unknown_file_keys_and_broken_files_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "s.toml"
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    assert "does not exist" in refusal()
    write_file(file, "prot = 1\n")
    assert "'prot'" in refusal()
    write_file(file, "port = \n")
    assert "not TOML" in refusal()
    file.write_bytes(b"\xff")
    assert "not TOML" in refusal()
    file.write_bytes(b"#" * (2 << 20))
    assert "larger than" in refusal()


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_settings_file_written_on_windows_is_read(
    encoding: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a byte order mark, or in UTF-16 as `>` of PowerShell 5 writes."""
    file = write_file(tmp_path / "s.toml", "")
    file.write_bytes("port = 7001\r\n# für alle\r\n".encode(encoding))
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    assert Settings().port == 7001
    for name in ("utf-16", "utf-32"):
        file.write_bytes("port = 7001".encode(name)[:-1])
        assert f"is not TOML: '{name}" in refusal()


@pytest.mark.parametrize("key", ["short", "has space in it", "schlüssel-lang", "new\nline-key", "k" * 513])
def test_a_refused_key_is_never_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_API_KEY", key)
    with pytest.raises(SettingsError) as caught:
        Settings()
    assert "SSMD_API_KEY" in str(caught.value)
    assert key not in "".join(traceback.format_exception(caught.value))


def test_a_good_key_is_not_shown_either() -> None:
    settings = Settings(api_key="a-very-secret-key")
    assert "a-very-secret-key" not in repr(settings) + str(settings) + settings.model_dump_json()
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "a-very-secret-key"


def test_a_key_under_a_wrong_name_is_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSMD_CONFIG", str(write_file(tmp_path / "s.toml", 'apikey = "a-very-secret-key"\n')))
    message = refusal()
    assert "'apikey'" in message
    assert "secret" not in message


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    Settings(host=host).check_exposure()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.2", "box.lan", "localhost.evil.example"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(SettingsError, match="SSMD_API_KEY"):
        Settings(host=host).check_exposure()
    Settings(host=host, api_key="a-very-secret-key").check_exposure()


def test_prepare_makes_a_private_directory(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "a" / "b")
    settings.prepare()
    assert stat.S_IMODE(settings.data_dir.stat().st_mode) == 0o700
    settings.data_dir.chmod(0o755)
    settings.prepare()
    assert stat.S_IMODE(settings.data_dir.stat().st_mode) == 0o700


def test_prepare_refuses_what_others_can_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="every user"):
        Settings(data_dir=tmp_path).prepare()


def test_prepare_refuses_a_directory_of_another_user(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(SettingsError, match="belongs to user 12345"):
        Settings(data_dir=tmp_path).prepare()


def test_prepare_refuses_a_file_in_the_way(tmp_path: Path) -> None:
    file = write_file(tmp_path / "f", "")
    for path in (file, file / "data"):
        with pytest.raises(SettingsError, match=f"--data-dir = .*: {re.escape(str(file))} is a file, not a folder"):
            Settings(data_dir=path)


def test_a_default_with_a_file_in_the_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platformdirs.user_data_dir", lambda *_, **__: str(write_file(tmp_path / "f", "")))
    with pytest.raises(SettingsError, match=r"the default data dir: .* is a file, not a folder"):
        Settings()


def test_a_settings_file_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_file(tmp_path / "config.toml", 'api_key = "a-secret-key"\n')
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    file.chmod(0o600)
    assert Settings().api_key is not None
    file.chmod(0o666)
    with pytest.raises(SettingsError, match=f"chmod go-w {re.escape(str(file))}"):
        Settings()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_settings_file_with_a_key_that_others_may_read_fails(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_file(tmp_path / "config.toml", 'api_key = "a-secret-key"\n')
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    file.chmod(mode)
    with pytest.raises(SettingsError, match=f"chmod 600 {re.escape(str(file))}"):
        Settings()
    write_file(file, "port = 1\n")
    assert Settings().port == 1


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root gives files away")
def test_a_key_may_be_group_readable_if_another_owns_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_file(tmp_path / "config.toml", 'api_key = "a-secret-key"\n')
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    os.chown(file, 65534, 0)
    file.chmod(0o640)
    assert Settings().api_key is not None


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("SSMD_PROT", "SSMD_PROT: no such setting; did you mean SSMD_PORT?"),
        ("ssmd_apikey", "ssmd_apikey: no such setting; did you mean SSMD_API_KEY?"),
        ("SSMD_CONFIGS", "SSMD_CONFIGS: no such setting; did you mean SSMD_CONFIG?"),
        ("SSMD_XYZZY", "SSMD_XYZZY: no such setting; there are: SSMD_DATA_DIR, "),
        ("SSMD_\x1b[2J", "SSMD_\\x1b[2J: no such setting"),
        ("SSMD_" + "A" * 10_000, f"SSMD_{'A' * 59}…: no such setting"),
    ],
)
def test_a_misspelt_variable_is_refused_by_name(variable: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "a-very-secret-key")
    message = refusal()
    assert message.startswith(said)
    assert "secret" not in message
    assert len(message) < 1000


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_PROT", "1")
    monkeypatch.setenv("SSMD_PORT", "x")
    message = refusal(threads=0)
    assert all(part in message for part in ("SSMD_PROT", "SSMD_PORT = 'x'", "--threads = '0'")), message


@pytest.mark.parametrize(
    "variable",
    [*OTHERS, "SSMD_SERVICE_HOST", "SSMD_SERVICE_PORT_HTTP", "SSMD_PORT_7763_TCP_ADDR", "SSMD_PORT_7763_TCP"],
)
def test_variables_that_are_no_settings_are_left_alone(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, str(write_file(tmp_path / "s.toml", "")))
    assert Settings().port == 7763
    monkeypatch.delenv(variable)
    monkeypatch.setenv("SSMD_NOTHING", "")  # as good as not set
    assert Settings().port == 7763


def test_the_settings_are_known_without_their_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert place.settings_variables() == variables()
    monkeypatch.setattr(place, "__file__", str(tmp_path / "daemon" / "place.pyc"))
    assert place.settings_variables() == variables(), "without its text"


def test_a_commands_flags_are_those_that_were_given() -> None:
    flags = {"port": 0, "access_log": False, "offline": True, "default": [], "model": "tiny", "yes": True}
    assert options.given(flags) == {"port": 0, "offline": True}


def test_every_variable_that_anything_here_reads_is_known() -> None:
    """Otherwise every command would refuse to run where it is set."""
    read = re.compile(r"environ(?:\.get\(|\.pop\(|\[)\s*f?\"(\w+)\"|\"(SSMD_\w+)\" in os\.environ")
    files = [
        p
        for folder in ("ssmd", "runtimes", "clients", "tests", "benchmarks", "scripts")
        for p in (ROOT / folder).rglob("*")
    ]
    found = set()
    for file in files:
        if file.is_file() and (file.suffix == ".py" or file.parent.name == "scripts"):
            found |= {a or b for a, b in read.findall(file.read_text("utf-8"))}
    ours = {name for name in found if name.startswith(PREFIX)}
    assert {"SSMD_CACHE_DIR", "SSMD_KILLS", "SSMD_LLAMA_LIBRARY"} <= ours, "the search finds what is there"
    assert ours - {f"{PREFIX}{name.upper()}" for name in Settings.model_fields} <= {*OTHERS, *OF_TESTS}


def test_a_misspelt_key_of_the_file_gets_a_question(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_file(tmp_path / "s.toml", f'max-queue = 1\nxyzzy = 2\n{"k" * 5000} = 3\n"\\u001b[2J" = 4\n')
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    message = refusal()
    assert f"'max-queue' in {file}: no such setting; did you mean max_queue?" in message
    assert f"'xyzzy' in {file}: no such setting; there are: data_dir, " in message
    assert "k" * 100 not in message
    assert "\x1b" not in message


def test_only_a_refused_flag_is_a_matter_of_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSMD_PORT", "x")
    for flags, usage in (({}, False), ({"threads": 1}, False), ({"threads": 0}, True), ({"port": "y"}, True)):
        with pytest.raises(SettingsError) as caught:
            Settings(**flags)
        assert caught.value.usage is usage, flags


def test_the_origin_of_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write_file(tmp_path / "s.toml", "port = 1\nmax_queue = 2\nmax_running = 3\n")
    monkeypatch.setenv("SSMD_CONFIG", str(file))
    monkeypatch.setenv("SSMD_PORT", "10")
    monkeypatch.setenv("ssmd_max_queue", "20")
    monkeypatch.setenv("SSMD_MAX_RUNNING", "")
    assert origin("port", ["port"]) == Origin("flag", "--port")
    assert origin("port") == Origin("environment", "SSMD_PORT")
    assert origin("max_queue") == Origin("environment", "SSMD_MAX_QUEUE")
    assert origin("max_running") == Origin("file", str(file))
    assert origin("host") == Origin("default", "default")


def test_what_is_wrong_is_left_out_where_somebody_looks_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SSMD_CONFIG", str(file := write_file(tmp_path / "s.toml", "max_queue = -1\nmax_running = 3\n")))
    monkeypatch.setenv("SSMD_PORT", "10")
    monkeypatch.setenv("SSMD_THREADS", "many")
    monkeypatch.setenv("SSMD_PROT", "11")
    settings, problem = usable(quota="1GB")
    assert (settings.max_queue, settings.max_running, settings.port) == (512, 3, 10)
    assert (settings.threads, settings.quota) == (None, 10**9)
    assert all(part in problem for part in (str(file), "SSMD_THREADS", "SSMD_PROT"))
    write_file(file, "no TOML")
    settings, problem = usable()
    assert (settings.max_running, settings.port) == (8, 10)
    assert "is not TOML" in problem
    with pytest.raises(SettingsError, match="--port"):
        usable(port="x")
    for name in ("SSMD_CONFIG", "SSMD_THREADS", "SSMD_PROT"):
        monkeypatch.delenv(name)
    assert usable(port=5) == (Settings(port=5), "")
