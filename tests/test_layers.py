"""Imports point one way: from the pipeline's end to its beginning."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import networkx
import pytest

import checkflow

PACKAGE = Path(__file__).parent.parent / "checkflow"

# What each part of the package may import from it. A package's own modules may import each other.
ALLOWED: dict[str, set[str]] = {
    "__init__": {
        "training", "checkpointing", "data", "distributed",
        "errors", "events", "extra", "frontend", "runtime", "schedule", "store",
    },
    "__main__": {"cli", "errors", "missing"},
    "missing": {"spelling", "text"},
    "spelling": set(),
    "collector": set(),
    "text": set(),
    "given": {"errors"},
    "workdir": {"errors", "given"},
    "errors": {"text"},
    "background": set(),
    "streams": set(),
    "interrupts": set(),
    "events": {"units"},
    "about": {"counts", "errors", "jsonfile", "strictjson"},
    "extra": {"errors", "given", "torch_internals"},
    "division": set(),
    "epochs": set(),
    "training": {"division", "extra", "wrapped"},
    "torch_internals": set(),
    "torch_ranks": set(),
    "wrapped": {"torch_internals"},
    "strictjson": set(),
    "dtypes": set(),
    "lanes": set(),
    "safetensorsfile": {"strictjson", "dtypes"},
    "units": {"errors"},
    "counts": {"units"},
    "unlisted": {"units"},
    "graph": {"errors", "unlisted"},
    "jsonfile": {"errors", "strictjson"},
    "graphfile": {"counts", "errors", "graph", "unlisted", "jsonfile"},
    "hardware": {"counts", "errors", "units", "graph", "jsonfile"},
    "plan": {"spelling", "background", "errors", "interrupts", "missing", "text", "units", "graph"},
    "foreach": {"wrapped", "torch_internals"},
    "module_hook": set(),
    "trace": {
        "collector", "foreach", "errors", "units", "graph", "training", "extra", "unlisted", "wrapped", "state",
        "dtypes", "missing", "spelling", "text", "torch_internals", "torch_ranks", "module_hook",
    },
    "version1": {"counts", "errors", "jsonfile"},
    "schedule": {"counts", "errors", "jsonfile", "version1"},
    "verify": {"errors", "graph", "graphfile", "schedule"},
    "lower": {"errors", "graph", "graphfile", "plan", "schedule"},
    "models": {"errors", "training"},
    "policies": {"spelling", "errors", "units", "graph", "plan", "schedule", "lower"},
    "compiler": {"spelling", "errors", "units", "graph", "plan", "policies", "schedule", "lower", "verify"},
    "choice": {"spelling", "errors", "units", "graph", "policies", "compiler", "simulation", "plan"},
    "report": {
        "choice", "errors", "text", "units", "graph", "plan", "policies", "schedule", "jsonfile", "compiler",
        "simulation",
    },
    "sources": {"spelling", "errors", "hardware", "jsonfile", "missing", "text", "training", "models", "workdir"},
    "timedgraph": {
        "spelling", "state", "errors", "unlisted", "graph", "graphfile", "hardware", "trace", "training", "sources",
        "workdir",
    },
    "frontend": {
        "choice", "errors", "given", "units", "graph", "jsonfile", "plan", "policies", "schedule", "compiler",
        "sources", "spelling", "timedgraph", "trace",
    },
    "store": {
        "background", "collector", "counts", "errors", "events", "interrupts", "streams", "text", "units", "strictjson",
        "dtypes", "safetensorsfile", "jsonfile", "lanes",
    },
    "state": {
        "about", "counts", "division", "errors", "units", "strictjson", "dtypes", "safetensorsfile", "training",
        "extra", "spelling", "wrapped", "torch_internals", "torch_ranks", "lanes", "epochs", "text",
    },
    "runtime": {
        "errors", "events", "dtypes", "foreach", "text", "units", "training", "wrapped", "state", "schedule",
        "torch_internals", "module_hook",
    },
    "simulation": {"errors", "jsonfile", "graph", "plan", "schedule", "runtime"},
    "data": {"errors", "epochs", "given", "text", "units"},
    "distributed": {
        "dtypes", "errors", "extra", "interrupts", "jsonfile", "strictjson", "torch_ranks", "state", "store",
        "training", "workdir",
    },
    "learning": {
        "collector", "data", "dtypes", "errors", "extra", "graph", "graphfile", "jsonfile", "schedule", "state",
        "torch_internals", "torch_ranks", "trace", "training", "unlisted", "wrapped", "compiler", "background",
        "streams", "units", "module_hook",
    },
    "checkpointing": {
        "about", "collector", "data", "division", "errors", "events", "interrupts", "text", "dtypes", "units",
        "unlisted", "training", "extra", "jsonfile", "state", "schedule", "runtime", "store", "torch_internals",
        "learning", "lanes", "distributed", "streams", "wrapped", "torch_ranks", "workdir", "given",
    },
    "replica": {"collector", "errors", "state", "store"},
    "integrations": {"checkpointing", "data", "distributed", "errors", "state", "store", "torch_internals"},
    "examples": {"__init__", "integrations"},
    "sweep": {
        "background", "counts", "errors", "interrupts", "units", "jsonfile", "graph", "graphfile", "hardware", "plan",
        "trace", "compiler", "missing", "policies", "report", "sources", "models", "text", "torch_internals",
    },
    "cli": {
        "about", "collector", "errors", "unlisted", "units", "jsonfile", "graph", "graphfile", "hardware", "models",
        "plan", "policies", "trace",
        "schedule", "verify", "compiler", "frontend", "timedgraph", "report", "sources", "training", "store", "sweep",
        "text", "dtypes", "interrupts", "missing", "simulation", "streams", "strictjson", "state", "lanes",
        "distributed", "workdir", "given",
    },
}  # fmt: skip

# The same within a part: between its rooms, and the files beside them. The store's trainer and saver are two processes:
# what both need is in a room above them.
ALLOWED_WITHIN: dict[str, dict[str, set[str]]] = {
    "plan": {
        "answer": set(),
        "problem": set(),
        "__init__": {"answer", "problem"},
        "timeline": {"__init__"},
        "infeasible": {"__init__"},
        "rebuilt": {"problem"},
        "streaming": {"__init__", "timeline", "infeasible"},
        "packed": {"__init__", "timeline", "infeasible"},
        "solve": {"__init__", "infeasible", "streaming", "packed"},
    },
    "store": {
        "libc": set(),
        "format": {"libc"},
        "memory": {"libc", "format"},
        "both": {"libc", "format"},
        "replica": {"memory", "both"},
        "saver": {"format", "memory", "both", "replica"},
        "bucket": {"format", "both"},
        "mirror": {"format", "memory", "both", "saver"},
        "trainer": {"format", "memory", "both", "replica"},
        "repair": {"format", "both"},
        "alone": {"format", "both"},
        "__init__": set(),
    },
    "state": {
        "attached": set(),
        "names": set(),
        "memory": set(),
        "groups": set(),
        "holders": {"names"},
        "shards": {"memory"},
        "refused": {"names", "memory", "holders", "shards"},
        "own": {"names", "refused"},
        "members": {"holders"},
        "live": {"names", "groups", "holders", "refused", "shards", "own"},
        "divided": {"names", "memory", "live", "shards"},
        "host": {"names", "memory", "holders", "refused", "live", "divided", "shards", "own"},
        "restore": {"names", "memory", "groups", "holders", "live", "host", "divided", "shards", "own"},
        "__init__": set(),
    },
}

# Types that a part may name in a signature without importing their module when it runs.
TYPES_ALONE = {"verify": {"checkflow.plan.Plan", "checkflow.plan.Problem"}}


def part_of(module: str) -> str:
    """The layer that a dotted module name below checkflow belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def all_imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def imports_of(path: Path) -> set[str]:
    return {name for name in all_imports_of(path) if name.split(".")[0] == "checkflow"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_towards_the_beginning_of_the_pipeline(path: Path) -> None:
    """A module imports only its own part and those that ALLOWED names for it."""
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    wrong = {name for name in imports_of(path) if part_of(name) not in ALLOWED[part] | {part}}
    wrong -= TYPES_ALONE.get(part, set())
    if part != "__init__":
        wrong -= {"checkflow.Training"}
    assert not wrong


@pytest.mark.parametrize(
    "path",
    sorted(path for part in ALLOWED_WITHIN for path in (PACKAGE / part).rglob("*.py")),
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_rooms_know_only_those_above_them(path: Path) -> None:
    """Neither process's code of the store reaches the other's, and what lies on disk or in memory knows neither."""
    part, room = path.relative_to(PACKAGE).parts[0], path.relative_to(PACKAGE).parts[1].removesuffix(".py")
    inner = {name.removeprefix(f"checkflow.{part}.") for name in imports_of(path) if part_of(name) == part}
    rooms = {name.split(".")[0] for name in inner}
    rooms = {room if room in ALLOWED_WITHIN[part] else "__init__" for room in rooms}
    assert rooms <= ALLOWED_WITHIN[part][room] | {room}


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Not within a part either, and not in a function: a file can be read before all that imports it."""
    named = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in modules()}
    named = {name.removesuffix(".__init__"): path for name, path in named.items()}
    arrows: networkx.DiGraph[str] = networkx.DiGraph()
    for name, path in named.items():
        for imported in imports_of(path):
            target = imported if imported in named else imported.rpartition(".")[0]
            if target != "checkflow":  # whose names are imported when they are used
                arrows.add_edge(name, target)
    assert not [sorted(circle) for circle in networkx.strongly_connected_components(arrows) if len(circle) > 1]


def test_json_is_read_in_one_place() -> None:
    """What one reader refuses, a key twice or NaN, no other may let pass."""
    readers = {
        path.name
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("loads", "load", "JSONDecoder")
        if isinstance(node.value, ast.Name) and node.value.id == "json"
    }
    assert readers == {"strictjson.py"}


COMPILES = (  # what checkflow.compile and the command share
    "choice", "compiler", "frontend", "lower", "plan", "policies", "sources", "timedgraph", "trace", "state",
)  # fmt: skip


def test_options_are_named_as_their_caller_wrote_them() -> None:
    """No text of these has an option of the command's in it: checkflow.spelling knows who asks."""
    options = {name.replace("_", "-") for name in inspect.signature(checkflow.compile).parameters}
    options |= {"set", "batch-size", "no-factors"}
    named = [
        f"{path.relative_to(PACKAGE)}: {node.value}"
        for path in modules()
        if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in COMPILES
        for each in ast.walk(ast.parse(path.read_text()))
        if not isinstance(each, ast.Expr)  # a docstring is one
        for node in ast.iter_child_nodes(each)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if options & set(re.findall(r"--([a-z][a-z-]*)", node.value))
    ]
    assert named == []


def test_no_tool_of_tests_runs_in_a_training() -> None:
    """Patching is what tests do; production says what it replaces, and until when."""
    tools = {"unittest", "pytest", "hypothesis"}
    assert not {path.name for path in modules() if tools & {name.split(".")[0] for name in all_imports_of(path)}}


def test_what_a_plan_is_can_be_said_without_a_solver() -> None:
    """Whoever names a Problem or a Plan loads no planner with it, and no library of one."""
    told = loaded_with("checkflow.plan")
    assert {name for name in told if name.startswith("checkflow.plan.")} == {
        "checkflow.plan.answer",
        "checkflow.plan.problem",
    }
    assert not told & {"numpy", "scipy", "highspy", "gurobipy"}


def loaded_with(module: str) -> set[str]:
    """The modules that are there once this one was imported, and no other."""
    loaded = f"import sys, {module}; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", loaded], check=True, capture_output=True, text=True).stdout
    return set(told.split())


def test_verify_never_reaches_the_planner() -> None:
    """Nothing that verify imports, however indirectly, is of the planner; its types are for signatures alone."""
    reached, todo = set(), ["verify"]
    while todo:
        part = todo.pop()
        if part not in reached:
            reached.add(part)
            todo += ALLOWED[part]
    assert not reached & {"plan", "lower", "compiler", "policies"}
    loaded = {name for name in loaded_with("checkflow.verify") if name.startswith("checkflow.")}
    assert {part_of(name) for name in loaded} <= reached


ELSEWHERE = ("models", "integrations")  # a file each, in the words of its paper, or its framework


def test_each_class_has_a_name_of_its_own() -> None:
    """One word, one thing: whoever reads a name in one part has not to ask which of two it is."""
    defined: dict[str, list[str]] = {}
    for path in sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in ELSEWHERE):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert len(defined) > 200
    assert {name: files for name, files in defined.items() if len(files) > 1} == {}
