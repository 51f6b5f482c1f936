"""Who may import whom: the rules of docs/ARCHITECTURE.md, read from the source itself."""

import ast
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cli", "clients", "engine", "ipc", "kvcache", "scheduler")
OURS = "tidegate"

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "kvcache": frozenset(),
    "ipc": frozenset({"kvcache"}),
    "scheduler": frozenset({"kvcache", "ipc"}),
    "engine": frozenset({"kvcache", "ipc"}),
    "clients": frozenset({"ipc"}),
    "cli": frozenset({*FOLDERS, "__version__"}),
}
PAGE_STORE = "tidegate.kvcache.page_store"
HEAVY_FOR_CORE = frozenset({"trio", "zmq", "torch", "structlog"})


class Import(NamedTuple):
    """One imported name. `at_load` says that loading the importer loads it too."""

    module: str
    at_load: bool
    is_relative: bool
    line: int


class Scanner(ast.NodeVisitor):
    """Collects the imports of a module, those in functions and under TYPE_CHECKING too."""

    def __init__(self) -> None:
        self.imports: list[Import] = []
        self._at_load = True

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imports.append(Import(alias.name, self._at_load, False, node.lineno))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        # An imported name may itself be a module: `from tidegate.clients import library`.
        for alias in node.names:
            module = ".".join(part for part in (node.module, alias.name) if part)
            self.imports.append(Import(module, self._at_load, node.level > 0, node.lineno))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_later(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_later(node)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)
            return
        for child in node.body:
            self._visit_later(child)
        for child in node.orelse:
            self.visit(child)

    def _visit_later(self, node: ast.AST) -> None:
        before, self._at_load = self._at_load, False
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.visit(node)
        else:
            self.generic_visit(node)
        self._at_load = before


def scan(source: str) -> list[Import]:
    scanner = Scanner()
    scanner.visit(ast.parse(source))
    return scanner.imports


def name_of(path: Path) -> str:
    """The module name of a file in one of the folders."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join((OURS, *(part for part in parts if part != "__init__")))


SOURCES: Mapping[str, list[Import]] = {
    name_of(path): scan(path.read_text(encoding="utf-8"))
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
} | {OURS: scan((ROOT / "src" / OURS / "__init__.py").read_text(encoding="utf-8"))}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def wrong_direction(importer: str, imports: list[Import]) -> list[str]:
    """What a module imports of ours although its folder may not."""
    folder = importer.split(".")[1]
    # The page store tells other processes how to reach its bytes, in the wire's words.
    aside = {"ipc"} if importer == PAGE_STORE else set[str]()
    allowed = MAY_IMPORT[folder] | {folder} | aside
    return [
        f"{importer}, line {one.line}: {one.module}"
        for one in imports
        if is_within(one.module, OURS) and one.module.split(".")[1] not in allowed
    ]


def loaded_by(module: str) -> dict[str, str]:
    """What loading a module loads: each module with the one that imports it."""
    loaded: dict[str, str] = {}
    todo = [(module, "the test")]
    while todo:
        name, importer = todo.pop()
        if name in loaded:
            continue
        loaded[name] = importer
        todo.extend((parent, name) for parent in _parents(name))
        todo.extend(
            (_module_of(one.module), name) for one in SOURCES.get(name, ()) if one.at_load
        )
    return loaded


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _module_of(imported: str) -> str:
    """`tidegate.kvcache.layout.Tokens` is a name in the module `tidegate.kvcache.layout`."""
    while is_within(imported, OURS) and imported not in SOURCES:
        imported = imported.rpartition(".")[0]
    return imported


def heavy(module: str, banned: frozenset[str]) -> list[str]:
    return [
        f"{importer} imports {name}"
        for name, importer in loaded_by(module).items()
        if name.split(".")[0] in banned
    ]


def loaded_in_a_fresh_process(statement: str) -> set[str]:
    """The top-level packages that Python has loaded after `statement`."""
    script = f"import sys\n{statement}\nprint(*(name.split('.')[0] for name in sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    return set(run.stdout.split())


def test_folders_import_in_one_direction() -> None:
    wrong = [
        line
        for name, imports in SOURCES.items()
        if name != OURS
        for line in wrong_direction(name, imports)
    ]
    assert not wrong


def test_nobody_imports_relatively_or_by_a_bare_folder_name() -> None:
    files = [
        path
        for folder in (*FOLDERS, "tests", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    wrong = [
        f"{path.relative_to(ROOT)}, line {one.line}: {one.module}"
        for path in files
        for one in scan(path.read_text(encoding="utf-8"))
        if one.is_relative or one.module.split(".")[0] in FOLDERS
    ]
    assert files
    assert not wrong


def test_page_bookkeeping_knows_integers_only() -> None:
    wrong = [
        f"{name}: {one.module}"
        for name, imports in SOURCES.items()
        if is_within(name, "tidegate.kvcache") and name != PAGE_STORE
        for one in imports
        if one.module.split(".")[0] == "torch" or is_within(one.module, PAGE_STORE)
    ]
    assert not wrong


def test_the_protocol_imports_nothing_of_ours_but_the_layout() -> None:
    ours = {
        _module_of(one.module)
        for one in SOURCES["tidegate.ipc.protocol"]
        if is_within(one.module, OURS)
    }
    assert ours == {"tidegate.kvcache.layout"}


def test_the_core_loads_no_socket_clock_tensor_or_log() -> None:
    assert "tidegate.scheduler.core" in SOURCES
    assert not heavy("tidegate.scheduler.core", HEAVY_FOR_CORE)


@pytest.mark.parametrize(
    ("statement", "banned"),
    [
        ("import tidegate", {"torch", "trio", "zmq"}),
        ("import tidegate.cli.main", {"torch", "trio", "zmq"}),
        ("import tidegate.cli.planning", {"torch", "trio", "zmq"}),
        ("import tidegate.engine.models.layouts", {"torch", "trio", "zmq"}),
        ("import tidegate.clients.logs.summary", {"torch", "trio", "zmq"}),
        ("import tidegate.clients.library", {"torch"}),
        ("import tidegate.clients.proxy.server", {"torch"}),
        ("import tidegate.ipc.protocol", {"torch", "trio", "zmq"}),
        ("import tidegate.scheduler.core", set(HEAVY_FOR_CORE)),
    ],
)
def test_a_light_module_stays_light(statement: str, banned: set[str]) -> None:
    assert not loaded_in_a_fresh_process(statement) & banned


def test_the_scan_sees_imports_wherever_they_stand() -> None:
    source = """
import a
from b import c
from . import d
if TYPE_CHECKING:
    import e
else:
    import f
def g():
    import h
class I:
    import j
try:
    import k
except ImportError:
    async def l():
        from m import n
"""
    found = {one.module: (one.at_load, one.is_relative) for one in scan(source)}
    assert found == {
        "a": (True, False),
        "b.c": (True, False),
        "d": (True, True),
        "e": (False, False),
        "f": (True, False),
        "h": (False, False),
        "j": (True, False),
        "k": (True, False),
        "m.n": (False, False),
    }


def test_a_wrong_direction_is_found() -> None:
    imports = scan(
        "from tidegate.scheduler import core\nimport tidegate.ipc.protocol\nimport re"
    )
    wrong = wrong_direction("tidegate.clients.library", imports)
    assert wrong == ["tidegate.clients.library, line 1: tidegate.scheduler.core"]
