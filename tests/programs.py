"""The programs of scripts/ as modules: they have no suffix by which Python would find them."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

from modules import ROOT


def script(name: str) -> ModuleType:
    """A program of scripts/ that is written in Python."""
    spec = spec_from_loader(f"script_{name}", SourceFileLoader(f"script_{name}", str(ROOT / "scripts" / name)))
    assert spec is not None
    assert spec.loader is not None
    module, keeps = module_from_spec(spec), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # beside the scripts
    try:
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = keeps
    return module
