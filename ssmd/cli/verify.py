"""`ssmd verify`: whether an artifact still computes what its reference computed."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from ssmd.cli import options


def verify(
    model: options.Model = None,
    runtime: options.Runtime = None,
    threads: options.Threads = None,
    models_dir: options.ModelsDir = None,
    as_json: options.Json = False,
) -> None:
    """Replay an artifact's golden values and print the error of every step. Exit code 1 if it is out of tolerance."""
