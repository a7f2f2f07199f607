"""The house stands as drawn: a folder is a floor, imports go down, in no circle, heavy ones stay in their rooms."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest
from modules import FILES, MODULES, ROOT, imported_by, imports, module_of, reached_from

FLOORS = {
    "cli": 8,
    "api": 6,
    "engine": 5,
    "build": 5,
    "daemon": 5,
    "sessions": 4,
    "refit": 4,
    "authoring": 3,
    "hub": 3,
    "runtime": 3,
    "families": 2,
    "text": 2,
    "model": 1,
    "machine": 1,
}
ALONE = {
    "__main__": 8,
    "server": 7,
    "app": 7,
    "installed": 5,
    "config": 2,
    "__init__": 1,
    "migrations": 4,
}  # files at the root
ROWS, STORE, CLOSETS = 1, 2, 3  # steps of the one floor that has several; what has no folder in it but the store is 0
HEAVY = {"torch", "litert_torch", "ai_edge_quantizer", "transformers", "gguf"}
WITH = {  # imported: comes with
    "PySide6": "PySide6-Essentials",
    "pydantic_core": "pydantic",
    "markupsafe": "jinja2",
    "flatbuffers": "ai-edge-litert",
    "litert_converter": "litert-torch",
}
UNIX_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty")
UNIX_NAMES = {
    "os": {
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "chown", "fchmod", "fchown", "fork", "getgid"),
        *("geteuid", "getloadavg", "getpgid", "getpgrp", "getpriority", "getuid", "killpg", "mkfifo", "nice", "pread"),
        *("pwrite", "sched_getaffinity", "setpriority", "setsid", "statvfs", "sysconf", "tcgetpgrp", "uname", "wait"),
    },
    "signal": {"SIGALRM", "SIGBUS", "SIGCHLD", "SIGHUP", "SIGKILL", "SIGTSTP", "SIGUSR1", "SIGXCPU"},
    "socket": {"AF_UNIX", "SO_PEERCRED"},
    "select": {"POLLRDHUP", "epoll", "poll"},
    "mmap": {"MADV_DONTNEED", "MAP_ANONYMOUS", "MAP_PRIVATE"},
}
# They ask first whether it is there.
ELSEWHERE = ("ssmd.families.weights", "ssmd_wgpu.resident")
MAKERS = ("ssmd.authoring", "ssmd.build", "ssmd.families", "ssmd.hub")  # what a running runtime never meets


def floor_of(module: str) -> tuple[int, int]:
    """(floor, step within it) of one of ssmd's modules."""
    _, room, *rest = [*module.split("."), "__init__"][:4]
    if room == "sessions":
        steps = {"rows": ROWS, "store": STORE, "files": CLOSETS, "fsck": CLOSETS, "remote": CLOSETS}
        return FLOORS[room], steps.get(rest[0], 0)
    return FLOORS.get(room) or ALONE[room], ROWS if room == "migrations" else 0


def test_the_folders_are_the_floors() -> None:
    folders = {p.name for p in (ROOT / "ssmd").iterdir() if any(p.rglob("*.py"))}
    assert folders == set(FLOORS)
    files = {p.stem for p in (ROOT / "ssmd").glob("*.py")}
    assert files == set(ALONE) - {"migrations"}


def test_the_page_on_the_architecture_has_the_floors() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rows = {name: int(floor) for floor, name in re.findall(r"^\| (\d) \| `ssmd/(\w+)", page, re.MULTILINE)}
    assert rows == FLOORS | {name: ALONE[name] for name in ("server", "app", "installed", "config")}


def test_tests_lie_as_the_code_does() -> None:
    """`whole` are those of the daemon as a process, `contract` those of every runtime, `runtimes` those of one;
    `daemon_client` are those of ssmd/daemon/, as tests/daemon.py is what others run a daemon with.
    """
    folders = {p.name for p in (ROOT / "tests").iterdir() if any(p.rglob("test_*.py"))}
    assert folders <= {*FLOORS, "runtimes", "clients", "contract", "whole", "daemon_client"} | {
        p.name for p in (ROOT / "tests").glob("*.py")
    }


def test_pytest_passes_over_no_folder(pytestconfig: pytest.Config) -> None:
    """By itself it does not look into one that is named build or dist."""
    folders = {part for p in (ROOT / "tests").rglob("test_*.py") for part in p.relative_to(ROOT).parts[:-1]}
    passed_over = pytestconfig.getini("norecursedirs")
    assert not [name for name in folders if any(fnmatch(name, pattern) for pattern in passed_over)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_down(file: Path) -> None:
    module = module_of(file)
    for imported, top in imports(file):
        package = imported.split(".")[0]
        if package in HEAVY and not module.startswith("ssmd.authoring"):
            makes = module.endswith((".build", ".convert")) or module == "ssmd.build.reference"
            assert makes or not top, f"{module} imports {imported} at its top"
        if package != "ssmd" or imported == "ssmd":
            continue
        if module.startswith("ssmd."):
            assert floor_of(imported) <= floor_of(module), f"{module} imports {imported} from a floor above"
        elif module.startswith("ssmd_tray"):
            assert imported.startswith(("ssmd.daemon", "ssmd.machine")), f"{module} imports {imported}: it is a client"
        else:
            assert floor_of(imported) <= (5, 0), f"{module} imports {imported}: a runtime is not of the daemon"
            assert not imported.startswith(("ssmd.sessions", "ssmd.engine")), f"{module} imports {imported}"


def test_nothing_goes_in_a_circle() -> None:
    done: set[str] = set()

    def walk(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle: {' -> '.join((*way[way.index(module) :], module))}"
        if module not in done:
            for imported in imported_by(module):
                if imported != "ssmd":
                    walk(imported, (*way, module))
            done.add(module)

    for module in MODULES:
        walk(module, ())


@pytest.mark.parametrize("runtime", sorted(m for m in MODULES if m.endswith(".runtime") and m.startswith("ssmd_")))
def test_a_running_runtime_knows_nothing_of_builds(runtime: str) -> None:
    """Neither it nor what it imports, at whatever place; and it needs no floor above the third."""
    reached = reached_from([runtime])
    for module in reached:
        assert not module.startswith(MAKERS), f"{runtime} reaches {module}"
        assert not module.endswith(".build"), f"{runtime} reaches {module}"
        if module.startswith("ssmd."):
            assert floor_of(module)[0] <= 3, f"{runtime} reaches {module}"
    assert len(reached) > 12, "a runtime imports more than this"


def test_runtimes_stand_apart() -> None:
    """The daemon finds runtimes through their entry points, never by importing them; and none imports another. Of
    clients the command that starts the tray imports that."""
    for module, file in MODULES.items():
        own = module.split(".")[0]
        tray = "ssmd_tray" if module == "ssmd.cli.tray" else own
        bad = [n for n, _ in imports(file) if n.startswith("ssmd_") and n.split(".")[0] not in (own, tray)]
        assert not bad, f"{file} imports {bad}"


def test_ssmd_names_no_runtime() -> None:
    """A runtime's facts stand in its own package (ssmd/runtime/info.py)."""
    names = {entry.name for entry in entry_points(group="ssmd.runtimes")}
    assert {"litert", "openvino"} <= names
    named = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sorted((ROOT / "ssmd").rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and node.value in names
    ]
    assert not named


def test_what_is_imported_is_among_the_dependencies() -> None:
    """By its own name, or by that of the package that is never without it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    asked = (*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra))
    named = {_same(re.split(r"[<>=~\[; ]", one)[0]) for one in asked}
    of = packages_distributions()
    for module, file in MODULES.items():
        for imported, _ in imports(file):
            package = imported.split(".")[0]
            if package not in sys.stdlib_module_names and not package.startswith("ssmd"):
                known = {_same(name) for name in (package, *of.get(package, ()), WITH.get(package, package))}
                assert known & named, f"{module} imports {package}, which pyproject.toml does not name"


def _same(name: str) -> str:
    """Names of distributions as the index compares them."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_not_every_system_has_is_asked_for_in_one_room() -> None:
    """Names that Python lacks on Windows; scripts/check has mypy look for all of them."""
    for module, file in MODULES.items():
        if not module.startswith("ssmd.machine.") and module not in ELSEWHERE:
            modules = [name for name, _ in imports(file) if name in UNIX_MODULES]
            bad = [*modules, *_unix_names(file.read_text("utf-8"))]
            assert not bad, f"{module} uses {bad}: that belongs into ssmd/machine"


def _unix_names(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.attr in UNIX_NAMES.get(node.value.id, ()):
                yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            of, name = node.args[0], node.args[1]
            if isinstance(of, ast.Name) and isinstance(name, ast.Constant):
                yield from (f"{of.id}.{known}" for known in UNIX_NAMES.get(of.id, ()) if known == name.value)


# Ways of running work beside the event loop, and of answering with an iterator that Starlette runs in a thread.
THREADS = {
    *("to_thread", "run_in_executor", "run_in_threadpool", "iterate_in_threadpool", "run_sync", "default_executor"),
    *("ThreadPoolExecutor", "ProcessPoolExecutor", "Thread", "Timer", "StreamingResponse", "BackgroundTasks"),
}
GATE = "ssmd.api.generate.fair_reading"
ITS_OWN = {
    GATE: {"run_in_executor", "ThreadPoolExecutor"},
    "ssmd.api.http.access": {"Thread"},  # one, which writes the lines of the access log
}


def test_the_interface_has_no_threads_but_the_gates() -> None:
    """Work that runs elsewhere takes no turns, and waits in a queue that any client can fill."""
    for module, file in MODULES.items():
        if module.startswith("ssmd.api.") or module == "ssmd.app":
            used = set(_threads(file.read_text("utf-8")))
            assert used == ITS_OWN.get(module, set()), f"{module} uses {used}: run it in a pool of {GATE}"


def _threads(text: str) -> Iterator[str]:
    """Names of THREADS that a module uses. That endpoints are coroutines is tested in api/test_surface.py."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) if name in THREADS:
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names if alias.asname is not None and alias.name in THREADS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("await asyncio.to_thread(work)", ["to_thread"]),
        ("await loop.run_in_executor(None, work)", ["run_in_executor"]),
        ("from starlette import concurrency as c\nawait c.run_in_threadpool(work)", ["run_in_threadpool"]),
        ("from anyio.to_thread import run_sync\nrun_sync(work)", ["run_sync"]),
        ("from threading import Thread as T\nT(target=work)", ["Thread"]),
        ("await pool.run(work, client)", []),
    ],
)
def test_no_thread_of_the_interface_goes_unseen(text: str, found: list[str]) -> None:
    assert list(_threads(text)) == found


def test_no_name_of_unix_goes_unseen() -> None:
    assert list(_unix_names("def f():\n    os.open('a', os.O_RDWR | os.O_CLOEXEC)")) == ["os.O_CLOEXEC"]
    assert list(_unix_names("hasattr(signal, 'SIGHUP')")) == ["signal.SIGHUP"]


def test_artifacts_and_sources_have_equal_bytes_on_every_system() -> None:
    """Its files are hashed and moved; a text has Windows' own line ends there unless it is said otherwise."""
    for module, file in MODULES.items():
        if module.startswith(("ssmd.model.", "ssmd.hub.", "ssmd.refit.", "ssmd.build.")) or module.endswith(".build"):
            lines = list(_loose_texts(file.read_text("utf-8")))
            assert not lines, f"{module} writes a text in lines {lines} with the line ends of whatever system it is"


def _loose_texts(text: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=ast.Attribute(attr="write_text"), keywords=given):
                if all(keyword.arg != "newline" for keyword in given):
                    yield node.lineno


def test_no_upward_import_goes_unseen(tmp_path: Path) -> None:
    """The walk itself: it sees imports inside functions and of names that are modules."""
    file = tmp_path / "sample.py"
    file.write_text("def f():\n    from ssmd.engine.decode import sharing\n    import torch.nn\n")
    assert list(imports(file)) == [("ssmd.engine.decode.sharing", False), ("torch.nn", False)]


def test_qt_stays_in_its_room() -> None:
    """The tray's decisions are tested without a display; and no other command waits for Qt."""
    for module, file in MODULES.items():
        bad = [name for name, _ in imports(file) if name.split(".")[0] in ("PySide6", "shiboken6")]
        assert not bad or module.startswith("ssmd_tray.qt."), f"{module} imports {bad}"
        tops = [name for name, top in imports(file) if top and name.startswith("ssmd_tray.qt")]
        assert not tops or module.startswith("ssmd_tray.qt."), f"{module} imports {tops} at its top"
    reached = reached_from([m for m in MODULES if m.startswith("ssmd_tray") and not m.startswith("ssmd_tray.qt")])
    assert len(reached) > 15, "the tray's logic is more than this"
    assert not [module for module in reached if module.startswith("ssmd_tray.qt")]
