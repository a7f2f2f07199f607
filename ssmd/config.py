"""The settings of ssmd: flags override environment variables, those the settings file, and that the defaults.

Environment: `SSMD_` and the field's name in capitals (`SSMD_PORT=8000`); lists are comma-separated. File: TOML with the
field names as keys, at `--config` or `SSMD_CONFIG`, else `config.toml` in the platform's settings directory of ssmd.
Variables and keys of other names are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, InitSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ssmd.machine import folder, homes, network
from ssmd.machine.duration import parse_duration
from ssmd.machine.processor import MOST_THREADS
from ssmd.machine.settingsfile import read_settings
from ssmd.machine.size import parse_size
from ssmd.machine.spelling import did_you_mean, printable
from ssmd.machine.variables import PREFIX, misspelt
from ssmd.model import aliases
from ssmd.model.defaults import Default, parse

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
SECRETS = ("api_key",)  # settings that are never shown
KEY = re.compile(r"[!-~]{8,512}")


class SettingsError(ValueError):
    """An unusable setting; the message names the flag, variable or file key, the value, and what is allowed.

    `usage`: True if one of them is a flag; `names`: the unusable settings.
    """

    def __init__(self, message: str, *, usage: bool = False, names: frozenset[str] = frozenset()) -> None:
        super().__init__(message)
        self.usage, self.names = usage, names


@dataclass(frozen=True)
class Origin:
    """The origin of a setting's value. where: the name of the option or variable, or the file's path."""

    kind: Literal["flag", "environment", "file", "default"]
    where: str


def use_file(path: Path) -> None:
    """Let this process, and the processes that it starts, read the settings from this file."""
    os.environ[f"{PREFIX}CONFIG"] = str(path)


def config_file() -> Path:
    """Return the path of the settings file. It need not exist unless SSMD_CONFIG names it."""
    named = os.environ.get(f"{PREFIX}CONFIG")
    return Path(named).expanduser() if named else homes.settings() / "config.toml"


def _default_models_dir(settings: dict[str, Any]) -> Path:
    # data_dir is absent here only if it was refused; then this value is not used.
    return Path(settings.get("data_dir", ".")) / "models"


def _is_url(remote: str) -> bool:
    """Return True for a URL, and for an address of a database that is not quite one: it may have a password."""
    return "://" in remote or remote.lower().startswith(("postgres:", "postgresql:")) or "password=" in remote


def _remote(value: str) -> str:
    """Return a folder's whole path, or the URL of a database as it is. Raises ValueError, without the URL."""
    if not _is_url(value):
        return str(folder.expanded(Path(value)))
    try:
        parts = urlsplit(value)
        if parts.password is not None or "password=" in parts.query:
            raise ValueError("the URL has a password, which other users could read: set PGPASSWORD or use ~/.pgpass")
    except ValueError as err:
        raise ValueError(str(err)) from None
    if parts.scheme not in ("postgresql", "postgres") or "://" not in value:
        raise ValueError("name a folder, or a database: postgresql://user@host/database")
    return value


AbsolutePath = Annotated[Path, AfterValidator(folder.absolute)]
Names = Annotated[tuple[str, ...], NoDecode]


class Settings(BaseSettings):
    """All settings, checked. Keyword arguments are flags, None where a flag was not given. Raises SettingsError."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True, hide_input_in_errors=True
    )

    data_dir: AbsolutePath = Field(
        default_factory=homes.data,
        validate_default=True,
        description="sessions and, unless models_dir says otherwise, models; default: the platform's own, such as "
        "`~/.local/share/ssmd`",
    )
    models_dir: AbsolutePath = Field(
        default_factory=_default_models_dir,
        validate_default=True,
        description="artifacts, as `<name>/<runtime>-<device class>-<quant>/`; default: `<data_dir>/models`",
    )
    remote: Annotated[str, AfterValidator(_remote)] | None = Field(
        None,
        description="a folder through which machines share conversations, such as one of a NAS, or a database, such "
        "as `postgresql://user@host/database?packs=/mnt/nas/packs`, or with `packs=s3://bucket/prefix`; a user with "
        "access to it reads everything in it ([remote.md](remote.md))",
    )
    ack: Literal["local", "remote"] = Field(
        "local",
        description="`remote`: an answer ends when its turn is in the database of `remote`, or after 5 s",
    )
    host: str = Field("127.0.0.1", description="address to listen on; beyond loopback a key is needed")
    port: int = Field(7763, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    socket: Annotated[Path, AfterValidator(folder.expanded)] | None = Field(
        None, description="path of a Unix socket to listen at, which this user alone can reach; no port is opened then"
    )
    also_listen: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="a second port of the same host, such as 11434, Ollama's, for [its clients](ollama.md)",
    )
    api_key: SecretStr | None = Field(
        None, description="what clients must send as `Authorization: Bearer …`; 8 to 512 printable ASCII characters"
    )
    api_keys_file: Annotated[Path, AfterValidator(folder.expanded)] | None = Field(
        None,
        description="file of several keys in place of `api_key`: a line each, `name key` or `name key read-only`; of "
        "mode 0600; read again on SIGHUP",
    )
    share_sessions: bool = Field(
        False, description="with `api_keys_file`: every name sees the sessions of all, not only its own"
    )
    allowed_hosts: Names = Field(
        (),
        validate_default=True,
        description="names a Host header may carry besides the loopback names and `host`, which are always added; "
        "`*` allows any and is the default where `host` is a wildcard address (the key is the protection then)",
    )
    allowed_origins: Names = Field(
        (),
        description="origins (`https://chat.example`, `app://obsidian.md`, `vscode-webview://…`) of web pages, apps "
        "and extensions that may call, besides pages served by ssmd itself; `*` allows any and needs a key",
    )
    threads: int | None = Field(
        None, ge=1, le=MOST_THREADS, description="compute threads; default: what the runtime chooses"
    )
    runtime: str = Field("auto", pattern=r"^[a-z0-9_]{1,32}$", description="a runtime's name, npu, or auto")
    device: str | None = Field(
        None, pattern=r"^[a-z0-9_.]{1,32}$", description="a device of the runtime; default: what the artifact is for"
    )
    max_running: int = Field(
        8, ge=1, le=256, description="choices that decode at the same time; clients that have none get some more"
    )
    max_queue: int = Field(512, ge=1, le=10_000, description="requests that wait; more are answered 503")
    max_body_bytes: int = Field(32 << 20, ge=1024, le=1 << 30, description="largest request body, bytes")
    quota: int = Field(
        8 << 30, ge=0, description="bytes of all checkpoints together, or a size such as 8GiB; more are removed"
    )
    keep_alive: float | None = Field(
        None,
        ge=0,
        description="how long a model stays loaded after its last request, such as 5m; 0 not at all, -1 for ever; "
        "default: 5m, and for ever where the daemon is for one model",
    )
    memory_budget: int | None = Field(
        None,
        ge=0,
        description="bytes of memory that loaded models may take together, or a size such as 4GiB; default: what the "
        "machine has free",
    )
    preload: Names = Field((), description="models to load at the start")
    pin: Names = Field((), description="models to load at the start and never to unload")
    truncation: Literal["auto", "disabled"] = Field(
        "disabled",
        description="a conversation that outgrows the model's context is refused, or (auto) its oldest turns are left "
        "out; a request may say so itself",
    )
    prompt_cache_retention: Literal["24h", "in_memory", "none"] = Field(
        "24h",
        description="how long the state of a request with `store: false` stays after its last use, sealed so that only "
        "its text opens it; a request may say so itself ([sessions.md](sessions.md#store-false))",
    )
    default: Names = Field(
        (),
        description="sampling options for requests that leave them out, in place of the models' own, such as "
        "`temperature=0.7,top_p=0.9`",
    )
    aliases: Names = Field(
        (),
        description="other names of installed models, as `NAME=MODEL`; `*` in a name stands for any text, the first "
        "that fits counts, such as `claude-*=smollm2,*=smollm2`; in the file a table `[aliases]` "
        "([http.md](http.md#aliases))",
    )
    strict: bool = Field(
        False, description="refuse unknown fields of requests; otherwise they are ignored and listed in the answer"
    )
    keep_volatile: bool = Field(
        False,
        description="let the model read text that clients put into system prompts for other servers' accounts and "
        "change with every request; otherwise it is [left out](http.md#volatile-text), so that stored states fit",
    )
    drain: float = Field(
        0.0,
        ge=0,
        le=3600,
        description="longest time, such as 60s, that a daemon which is to stop still answers requests, while `/health` "
        "is 503: until a balancer has taken it away and streams have ended ([scaling.md](scaling.md#stop-one))",
    )
    offline: bool = Field(False, description="fetch nothing, whatever is missing; HF_HUB_OFFLINE=1 asks for the same")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe message logged")
    stream_comment: float = Field(
        10.0,
        ge=0.01,
        description="longest silence of a stream that has no word yet, such as 5s: then it sends a comment, so that "
        "clients and proxies keep the connection",
    )
    access_log: bool = Field(
        False,
        description="a line for each request on stdout, without text of clients ([daemon.md](daemon.md#access-log))",
    )
    access_log_format: Literal["text", "json"] = Field("text", description="format of the access log")
    slow_request: float = Field(
        2.0,
        ge=0,
        description="time (such as 500ms) from which the access log marks a request as `slow`: to the first token of "
        "an answer, or to the end of any other request",
    )
    core_dumps: bool = Field(
        False,
        description="let a crash write a process's memory into a core file; for developers of runtimes",
    )

    def __init__(self, **flags: Any) -> None:
        given = {name: value for name, value in flags.items() if value is not None}
        wrong = list(self._misspelt())
        names: set[str] = set()
        try:
            super().__init__(**given)
        except ValidationError as err:
            found = err.errors(include_url=False)
            names.update(str(e["loc"][0]) for e in found if e["loc"])
            wrong += [_explain(e, given) for e in found]
        # Outside of `except`: pydantic's own message must not follow, because it may quote the key.
        if wrong:
            raise SettingsError("; ".join(wrong), usage=bool(names & given.keys()), names=frozenset(names))

    @staticmethod
    def _misspelt() -> Iterator[str]:
        return misspelt(variables())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, read_file())

    @field_validator("allowed_hosts", "allowed_origins", "preload", "pin", "default", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("aliases", mode="before")
    @classmethod
    def _aliases_are_texts(cls, value: Any) -> Any:
        if isinstance(value, dict):  # the table of the settings file
            for name, model in value.items():
                if not isinstance(model, str) or "=" in name:
                    raise ValueError(f'{printable(name)!r}: expected a line such as "claude-*" = "smollm2"')
            return [f"{name}={model}" for name, model in value.items()]
        return cls._split(value)

    @field_validator("quota", "memory_budget", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError("expected a number of bytes, or a size such as '8GiB'")
        return parse_size(value) if isinstance(value, str) else value

    @field_validator("keep_alive", "slow_request", "stream_comment", "drain", mode="before")
    @classmethod
    def _duration(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float | str | None):
            raise ValueError("expected seconds, or a time such as '5m'")
        return value if value is None else parse_duration(str(value))

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("host")
    @classmethod
    def _host_is_an_address(cls, value: str) -> str:
        bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        if network.address(bare) is None and not network.is_hostname(bare):
            raise ValueError("expected an IP address or a host name, without scheme and port")
        return bare

    @field_validator("api_key")
    @classmethod
    def _key_fits_a_header(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not KEY.fullmatch(value.get_secret_value()):
            raise ValueError("expected 8 to 512 printable ASCII characters without spaces")
        return value

    @field_validator("api_keys_file")
    @classmethod
    def _one_kind_of_keys(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("api_key") is not None:
            raise ValueError("there is an api_key too; write it into this file, with a name, and leave it out there")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        bound = network.address(info.data.get("host", ""))
        wildcard = bound is not None and bound.is_unspecified
        names = list(LOOPBACK_NAMES)
        if not wildcard and "host" in info.data:
            names.append(network.bracketed(info.data["host"]))
        for name in value or (("*",) if wildcard else ()):
            bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
            if name != "*" and network.address(bare) is None and not network.is_hostname(name):
                raise ValueError(f"{name!r} is not a host name or IP address (no scheme, no port), nor '*'")
            names.append(network.bracketed(bare))
        return tuple(dict.fromkeys(names))

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_origins(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if "*" in value and not any(info.data.get(one) for one in ("api_key", "api_keys_file")):
            raise ValueError("'*' lets every web page call this computer: set an api_key with it")
        return tuple(dict.fromkeys(one if one == "*" else network.origin(one) for one in value))

    @field_validator("default")
    @classmethod
    def _defaults_are_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            parse(one)
        return value

    @field_validator("aliases")
    @classmethod
    def _aliases_are_aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(str, aliases.parse(value)))

    @field_validator("also_listen")
    @classmethod
    def _second_port_is_another(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("socket") is not None:
            raise ValueError("there is a socket too, in place of any port; leave one of them out")
        if value is not None and value == info.data.get("port"):
            raise ValueError("the daemon listens at this port anyway; leave it out, or name another")
        return value

    @property
    def defaults(self) -> dict[str, Default]:
        """Return the sampling defaults in `default`; the last value of an option counts."""
        return {name: Default(value, "the setting `default`") for name, value in map(parse, self.default)}

    @property
    def loopback(self) -> bool:
        """Return True if `host` can be reached from this computer only."""
        address = network.address(self.host)
        return self.host.lower() == "localhost" if address is None else address.is_loopback

    @property
    def keyed(self) -> bool:
        """Return True if clients need a key."""
        return self.api_key is not None or self.api_keys_file is not None

    def check_exposure(self) -> None:
        """Raise SettingsError, before a port is opened, if other computers could reach it without a key."""
        if self.socket is None and not self.loopback and not self.keyed:
            raise SettingsError(
                f"host {self.host} can be reached from other computers: set an API key ({PREFIX}API_KEY, or api_key in "
                f"{config_file()}), or use host 127.0.0.1, or a socket"
            )

    def prepare_models(self) -> None:
        """Make the models directory. Raises SettingsError."""
        self._have(folder.writable, self.models_dir, "models")

    def prepare(self) -> None:
        """Make the data directory, mode 0700. Raises SettingsError if it cannot be trusted or made."""
        self._have(folder.own, self.data_dir, "data")

    @staticmethod
    def _have(make: Callable[[Path, str, str], None], path: Path, what: str) -> None:
        try:
            make(path, f"{what} directory", f"choose another with {PREFIX}{what.upper()}_DIR")
        except ValueError as err:
            raise SettingsError(str(err)) from err


def read_file() -> dict[str, Any]:
    """Return the settings in the settings file. Raises SettingsError."""
    path = config_file()
    try:
        return read_settings(path, SECRETS)
    except FileNotFoundError:
        if os.environ.get(f"{PREFIX}CONFIG"):
            raise SettingsError(
                f"settings file {path}, which {PREFIX}CONFIG names, does not exist: write it, or leave the variable out"
            ) from None
        return {}
    except ValueError as err:
        raise SettingsError(str(err)) from None


def variables() -> list[str]:
    """Name the environment variable of each setting."""
    return [f"{PREFIX}{name.upper()}" for name in Settings.model_fields]


def origin(name: str, flags: Collection[str] = ()) -> Origin:
    """Return where the setting `name` has its value from; `flags`: names of the settings given as flags.

    Raises SettingsError if the settings file cannot be read.
    """
    variable = f"{PREFIX}{name.upper()}"
    if name in flags:
        return Origin("flag", f"--{name.replace('_', '-')}")
    if environment().get(variable):
        return Origin("environment", variable)
    if name in read_file():
        return Origin("file", str(config_file()))
    return Origin("default", "default")


def environment() -> dict[str, str]:
    """Return the environment's variables, with their names in capitals."""
    return {name.upper(): value for name, value in os.environ.items()}


def _explain(error: ErrorDetails, flags: dict[str, Any]) -> str:
    """Explain a refused value in one line: where it came from, the value (a key is never shown), what is allowed."""
    name = str(error["loc"][0]) if error["loc"] else "settings"
    if error["type"] == "extra_forbidden":
        where = f"--{name.replace('_', '-')}" if name in flags else f"{printable(name)!r} in {config_file()}"
        meant = did_you_mean(name, Settings.model_fields) or f"; there are: {', '.join(Settings.model_fields)}"
        return f"{where}: no such setting{meant}"
    came = origin(name, flags)
    value, where = None, came.where
    if came.kind == "flag":
        value = flags[name]
    elif came.kind == "environment":
        value = environment()[came.where]
    elif came.kind == "file":
        value, where = read_file()[name], f"{name!r} in {came.where}"
    else:
        where = f"the default {name.replace('_', ' ')}"
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    hidden = name in SECRETS or (name == "remote" and _is_url(text))  # which may have a password
    said = "" if hidden or value is None else f" = {text[:200]!r}"
    reason = error["msg"].removeprefix("Value error, ")
    return f"{where}{said}: {reason[0].lower()}{reason[1:]}"
