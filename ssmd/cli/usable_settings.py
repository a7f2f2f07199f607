"""Usable settings in spite of wrong ones, for the doctor: a refused value counts as not given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from ssmd.config import Settings, SettingsError, environment, read_file
from ssmd.machine.variables import PREFIX


def usable(**flags: Any) -> tuple[Settings, str]:
    """Return the settings, with defaults for wrong values in the environment and the file, and those problems, or "".

    Raises SettingsError for a refused flag.
    """
    try:
        return Settings(**flags), ""
    except SettingsError as err:
        if err.usage:
            raise
        problem = str(err)
    try:
        file = read_file()
    except SettingsError:
        file, problem = {}, "; ".join([problem, *_wrong_beside_the_file(flags)])
    known = environment()
    told = {name: known.get(f"{PREFIX}{name.upper()}") for name in Settings.model_fields}
    given = {name: value for name, value in flags.items() if value is not None}
    asked = {**file, **{name: value for name, value in told.items() if value}, **given}
    while True:
        try:
            return _ArgumentSettings(
                **{name: value for name, value in asked.items() if name in Settings.model_fields}
            ), problem
        except SettingsError as err:
            if not (refused := err.names & asked.keys() - given.keys()):
                raise
            asked = {name: value for name, value in asked.items() if name not in refused}


def _wrong_beside_the_file(flags: dict[str, Any]) -> Iterator[str]:
    """Yield the problems of variables. Raises SettingsError for a refused flag."""
    try:
        _WithoutFile(**flags)
    except SettingsError as err:
        if err.usage:
            raise
        yield str(err)


class _WithoutFile(Settings):
    """Settings of flags and the environment."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *others: PydanticBaseSettingsSource,
        **more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings


class _ArgumentSettings(Settings):
    """Settings of the given values alone, without the environment and the file."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *others: PydanticBaseSettingsSource,
        **more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @staticmethod
    def _misspelt() -> Iterator[str]:
        return iter(())
