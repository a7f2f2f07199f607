"""The house stands as drawn: imports go down the floors only, heavy ones stay in their rooms, files stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The floor of a module is that of its longest listed prefix.
FLOORS = {
    "ssmd": 1,
    "ssmd.state": 1,
    "ssmd.sampling": 1,
    "ssmd.memory": 1,
    "ssmd.cache": 1,
    "ssmd.metrics": 1,
    "ssmd.processor": 1,
    "ssmd.config": 1,
    "ssmd.buckets": 1,
    "ssmd.size": 1,
    "ssmd.source": 1,
    "ssmd.stages": 1,
    "ssmd.artifact": 2,
    "ssmd.runtime": 2,
    "ssmd.contract": 2,
    "ssmd.text": 2,
    "ssmd.verify": 2,
    "ssmd.probe": 2,
    "ssmd.quality": 2,
    "ssmd.flat": 2,
    "ssmd.families": 2,
    "ssmd.authoring": 2,
    "ssmd.smollm2": 2,
    "ssmd.hub": 2,
    "ssmd.download": 2,
    "ssmd.sources": 2,
    "ssmd.stripped": 2,
    "ssmd.refit": 2,
    "ssmd.seeded": 2,
    "ssmd.install": 2,
    "ssmd.graphs": 2,
    "ssmd.sessions": 3,
    "ssmd.migrations": 3,
    "ssmd.generation": 3,
    "ssmd.models": 3,
    "ssmd.bench": 3,
    "ssmd.lane": 4,
    "ssmd.prompt": 4,
    "ssmd.writer": 4,
    "ssmd.loader": 4,
    "ssmd.keeper": 4,
    "ssmd.warmup": 4,
    "ssmd.inflight": 4,
    "ssmd.repair": 4,
    "ssmd.replay": 4,
    "ssmd.admission": 4,
    "ssmd.engine": 4,
    "ssmd.api": 5,
    "ssmd.server": 5,
    "ssmd.cli": 6,
    "ssmd.__main__": 6,
}
HEAVY = {"torch", "litert_torch", "ai_edge_quantizer", "transformers", "gguf"}
FILES = sorted(
    [*(ROOT / "ssmd").rglob("*.py"), *(ROOT / "runtimes").rglob("*.py"), *(ROOT / "migrations").rglob("*.py")]
)


def module_of(file: Path) -> str:
    relative = file.relative_to(ROOT)
    parts = list(relative.with_suffix("").parts)
    if parts[0] == "runtimes":
        parts = parts[1:]
    elif parts[0] == "migrations":
        parts = ["ssmd", *parts]
    return ".".join(parts).removesuffix(".__init__")


def floor_of(module: str) -> int:
    prefix = max((p for p in FLOORS if module == p or module.startswith(p + ".")), key=len)
    return FLOORS[prefix]


def imports(file: Path) -> Iterator[tuple[str, bool]]:
    """(module, whether the import stands at the top level)."""
    tree = ast.parse(file.read_text("utf-8"))
    top = set(map(id, tree.body))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            known = {module_of(f) for f in FILES}
            yield from ((name if name in known else node.module, id(node) in top) for name in names)


def test_every_module_has_its_floor() -> None:
    listed = {p for p in FLOORS if p != "ssmd"}
    rooms = {m for m in map(module_of, FILES) if m.startswith("ssmd.")}
    homeless = {m for m in rooms if not any(m == p or m.startswith(p + ".") for p in listed)}
    assert not homeless, f"give these modules a floor: {sorted(homeless)}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file: Path) -> None:
    module = module_of(file)
    for imported, top in imports(file):
        package = imported.split(".")[0]
        if package in HEAVY and not module.startswith("ssmd.authoring"):
            assert module.endswith((".build", ".convert")) or not top, f"{module} imports {imported} at its top"
        if package != "ssmd" or imported == "ssmd":
            continue
        if module.startswith("ssmd."):
            assert floor_of(imported) <= floor_of(module), f"{module} imports {imported} from a floor above"
        else:
            assert floor_of(imported) <= 2, f"{module} imports {imported}: a runtime knows floors 1 and 2 only"


@pytest.mark.parametrize("runtime", sorted(m for m in map(module_of, FILES) if m.endswith(".runtime") and "_" in m))
def test_a_running_runtime_knows_nothing_of_builds(runtime: str) -> None:
    """Neither it nor what it imports, at whatever place, knows modules or families: those are its build.py's."""
    files = {module_of(file): file for file in FILES}
    reached, todo = set(), [runtime]
    while todo:
        module = todo.pop()
        assert not module.startswith(("ssmd.authoring", "ssmd.families")), f"{runtime} reaches {module}"
        assert not module.endswith(".build"), f"{runtime} reaches {module}"
        reached.add(module)
        package = runtime.split(".")[0]
        if module.startswith(package):
            todo += [name for name, _ in imports(files[module]) if name in files and name not in reached]
    assert len(reached) > 3, "a runtime imports more than this"


def test_runtimes_stand_apart() -> None:
    """The daemon finds runtimes through their entry points, never by importing them."""
    for file in FILES:
        if module_of(file).startswith("ssmd."):
            bad = [name for name, _ in imports(file) if name.startswith("ssmd_") and not name.endswith(".build")]
            assert not bad, f"{file} imports {bad}"


def test_no_upward_import_goes_unseen(tmp_path: Path) -> None:
    """The walk itself: it sees imports inside functions and of names that are modules."""
    file = tmp_path / "sample.py"
    file.write_text("def f():\n    from ssmd import engine\n    import torch.nn\n")
    assert list(imports(file)) == [("ssmd.engine", False), ("torch.nn", False)]
