"""The modules of the house and of its tests, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = sorted(f for room in ("ssmd", "runtimes", "clients", "migrations") for f in (ROOT / room).rglob("*.py"))
TESTS = sorted(f for room in ("tests", "benchmarks") for f in (ROOT / room).rglob("*.py"))


def module_of(file: Path) -> str:
    """A file's name as it is imported; that of a test or of what helps one begins below its room."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in ("runtimes", "clients", "tests", "benchmarks"):
        parts = parts[1:]
    elif parts[0] == "migrations":
        parts = ["ssmd", *parts]
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}
ALL = {**{module_of(file): file for file in TESTS}, **MODULES}


@cache
def imports(file: Path) -> tuple[tuple[str, bool], ...]:
    """(module, whether the import stands at the top level) of what is imported when the program runs."""
    return tuple(_imports(file))


def _imports(file: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(file.read_text("utf-8"))
    top = set(map(id, tree.body))
    for node in _running(tree, started=file not in TESTS):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name if name in ALL else node.module, id(node) in top) for name in names)


def _running(tree: ast.AST, started: bool) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker reads; those of a started program too, or not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If):
            test = node.test.left if isinstance(node.test, ast.Compare) else node.test
            name = test.id if isinstance(test, ast.Name) else ""
            if name == "TYPE_CHECKING" or (name == "__name__" and not started):
                continue
        yield node
        yield from _running(node, started)


@cache
def imported_by(module: str) -> tuple[str, ...]:
    """Ours alone."""
    return tuple(dict.fromkeys(name for name, _ in imports(ALL[module]) if name in ALL))


def reached_from(modules: Iterable[str], but: Collection[str] = ()) -> set[str]:
    """Return the modules that run when these do, these included. Nothing is reached through those of `but`."""
    reached: set[str] = set()
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module not in reached and module not in but:
            reached.add(module)
            todo += imported_by(module)
    return reached


def distances(module: str) -> dict[str, int]:
    """Return for each module that runs when this one does the number of imports on the shortest way to it."""
    found, last = {module: 0}, [module]
    while last:
        last = list(dict.fromkeys(other for one in last for other in imported_by(one) if other not in found))
        found |= dict.fromkeys(last, max(found.values()) + 1)
    return found
