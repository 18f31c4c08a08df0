"""What users install: the wheel and the sdist of this tree, in an environment of their own, away from it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from checkflow.missing import REQUIREMENTS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NOT_SHIPPED = ("tests", "benchmarks", "notebooks", "graphs", "schedules", "docs")
PLANNERS = {"gurobipy", "pulp", "highspy", "scipy", "networkx", "matplotlib"}

EXTRAS = {path.stem for path in (ROOT / "checkflow" / "integrations").glob("[!_]*.py")}


def extra_of(path: Path) -> str:
    """Of integrations/transformers.py and examples/transformers_trainer.py: "transformers"."""
    return path.stem.partition("_")[0]


WITH_EXTRA = [
    path
    for room in ("integrations", "examples")
    for path in sorted((ROOT / "checkflow" / room).glob("*.py"))
    if extra_of(path) in EXTRAS
]


def done(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """What it printed; without a PYTHONPATH that would lead back to the tree, unless one is given."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build(kind: str, tree: Path, into: Path) -> Path:
    pythonpath = os.environ.get("PYTHONPATH", "")
    done([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into], tree, PYTHONPATH=pythonpath)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's Python: the wheel is installed there, what it depends on is this environment's, not copied."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    done([sys.executable, "-m", "venv", "--without-pip", venv], ROOT)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install", "--quiet"]
    done([*pip, "--no-index", "--no-deps", wheel], ROOT)
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(done([python, "-c", asked], venv).strip())
    ours = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    site.joinpath("shared.pth").write_text("".join(f"{path}\n" for path in sorted(ours)))
    return python


def test_it_is_imported_and_demonstrated_away_from_the_tree(installed: Path, tmp_path: Path) -> None:
    """The demo compiles, trains, kills, resumes and compares, all with what is in the wheel."""
    asked = "import checkflow; print(checkflow.__file__, checkflow.__version__)"
    where, version = done([installed, "-c", asked], tmp_path).split()
    assert Path(where).is_relative_to(installed.parent.parent) and version == PROJECT["version"]
    told = done([installed.with_name("checkflow"), "demo", "--iterations", "4"], tmp_path)
    assert "bit-identical" in told


def test_the_wheel_has_the_package_alone(wheel: Path) -> None:
    """Every file of it that is under version control, and nothing of the tree around it."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = done(["git", "ls-files", "checkflow"], ROOT).split() if (ROOT / ".git").exists() else []
    assert names >= set(tracked) and all(name.startswith("checkflow/") for name in names)


def test_the_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """To the byte; and the sdist has what its own tests need."""
    sdist = build("sdist", ROOT, tmp_path / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert all((tree / name).is_dir() for name in NOT_SHIPPED)
    again = build("wheel", tree, tmp_path / "wheel")
    assert again.name == wheel.name and again.read_bytes() == wheel.read_bytes()


def test_what_the_package_imports_is_what_it_requires() -> None:
    """Neither a dependency that happens to be here, nor one that nothing needs; what plots need is imported late."""
    pairs = [imported(path) for path in (ROOT / "checkflow").rglob("*.py") if path not in WITH_EXTRA]
    always, late = (set[str]().union(*found) for found in zip(*pairs, strict=True))
    assert distributions(always) <= required(PROJECT["dependencies"])
    late_alone = {extra: required(PROJECT["optional-dependencies"][extra]) for extra in ("plot", "bucket")}
    assert distributions(always | late) == required(PROJECT["dependencies"]).union(*late_alone.values())
    assert late_alone == {"plot": distributions({"matplotlib"}), "bucket": distributions({"obstore"})}


INSTEAD = {"lightning": {"pytorch_lightning"}}  # imported where the extra's own is not there


@pytest.mark.parametrize("path", WITH_EXTRA, ids=lambda path: path.stem)
def test_an_integration_and_its_example_import_what_their_extra_has(path: Path) -> None:
    """Beside what is there anyway."""
    extra = {name.replace("-", "_") for name in required(PROJECT["optional-dependencies"][extra_of(path)])}
    always, late = imported(path)
    modules = (always | late) - INSTEAD.get(path.stem, set())
    assert extra_of(path) in modules
    there = {module for module in modules if module in packages_distributions()}
    assert distributions(there - extra) <= required(PROJECT["dependencies"]) and modules - there <= extra


def imported(path: Path) -> tuple[set[str], set[str]]:
    """Other people's packages that a file imports: when it is imported itself, and later."""
    tree = ast.parse(path.read_text())
    top = {id(node) for statement in tree.body for node in (statement, *tried(statement))}
    always, late = set[str](), set[str]()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        (always if id(node) in top else late).update(name.split(".")[0] for name in names)
    known = set(sys.stdlib_module_names) | {"checkflow", ""}
    return always - known, late - known


def tried(statement: ast.stmt) -> list[ast.stmt]:
    return statement.body if isinstance(statement, ast.Try) else []


def distributions(modules: set[str]) -> set[str]:
    found = packages_distributions()
    return {normal(found[module][0]) for module in modules}


def required(listed: Sequence[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=~!; ]", line, maxsplit=1)[0]) for line in listed}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


TRAINING = """
import sys, torch, checkflow
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
with checkflow.attach(model, optimizer, schedule=sys.argv[1], store="store") as ckpt:
    for _ in range(ckpt.restore(), 3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
print("checkflow.checkpointing.attach" in sys.modules, *sorted({name.split(".")[0] for name in sys.modules}))
"""
FACTORY = """
import torch, checkflow
def training():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    def iterate():
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkflow.Training(model, optimizer, iterate)
"""


def test_a_training_imports_no_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attached, trained and closed: solvers, their matrices, graph tools and plots stay on the disk."""
    from checkflow.cli import run

    (tmp_path / "train.py").write_text(TRAINING)
    (tmp_path / "factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert run(["compile", "factory.py", "--bandwidth", "5GB/s", "--interval", "auto", "-o", "schedule.json"]) == 0
    script = [sys.executable, "-c", TRAINING, "schedule.json"]
    ran = subprocess.run(script, cwd=tmp_path, check=True, capture_output=True, text=True)
    attached, *loaded = ran.stdout.split()
    assert attached == "True" and not PLANNERS & set(loaded)


EXECUTE = str(ROOT / "notebooks" / "execute.py")
HIDING = """
import sys
hidden = sys.argv.pop(1).split(",")
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
"""
WITHOUT = {
    "matplotlib": ("plot", "from checkflow.cli import main; main()", ["compile", "alexnet", "--report", "r.png"]),
    "obstore": ("bucket", "from checkflow.cli import main; main()", ["list", "s3://bucket/run"]),
    "nbclient": ("notebooks", f"import runpy; runpy.run_path({EXECUTE!r}, None, '__main__')", ["nothing.ipynb"]),
}


def hiding(modules: str, script: str, arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script where modules, and what is in them, cannot be imported."""
    command = [sys.executable, "-c", HIDING + script, modules, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("module", WITHOUT)
def test_what_is_not_installed_is_named_with_its_extra(module: str, tmp_path: Path) -> None:
    """Before any work, in one line with what to type."""
    extra, script, arguments = WITHOUT[module]
    ran = hiding(module, script, arguments, tmp_path)
    assert ran.returncode == 2 and not list(tmp_path.iterdir())
    assert len(ran.stderr.strip().splitlines()) == 1
    assert module in ran.stderr and f"pip install 'checkflow[{extra}]'" in ran.stderr
    assert extra in PROJECT["optional-dependencies"]


def test_a_store_is_listed_without_planners(tmp_path: Path) -> None:
    """A machine that only restores needs none of them."""
    script = "from checkflow.cli import main; main()"
    ran = hiding(",".join(sorted(PLANNERS)), script, ["list", str(tmp_path)], tmp_path)
    assert ran.returncode == 0, ran.stderr


def test_what_a_missing_package_is_told_with_is_what_the_project_needs() -> None:
    """Its bounds, too: a newer pulp would be no use. And the module is one that the package has."""
    assert sorted(REQUIREMENTS.values()) == sorted(PROJECT["dependencies"])
    packages = packages_distributions()
    for module, requirement in REQUIREMENTS.items():
        assert re.split(r"[<>=]", requirement)[0] in {name.lower() for name in packages[module]}


SOLVERS = {"gurobipy": "gurobi", "highspy": "highs", "pulp": "cbc"}


@pytest.mark.parametrize("module", REQUIREMENTS)
def test_a_package_that_is_not_installed_is_bad_input(module: str, tmp_path: Path) -> None:
    """One line with what to type, after what is told of progress; nobody is asked to report it."""
    arguments = ["compile", str(ROOT / "graphs" / "alexnet-1.json"), "--bandwidth", "63GB/s", "-o", "s.json"]
    wanted = f"{module} is not installed: pip install '{REQUIREMENTS[module]}'"
    if module in SOLVERS:  # what can be done without is said by whoever asked for it
        arguments += ["--interval", "auto", "--transfers", "packed", "--solver", SOLVERS[module]]
        wanted = f"solver {SOLVERS[module]}: {wanted}; choose another or auto"
    ran = hiding(module, "from checkflow.__main__ import main; main()", arguments, tmp_path)
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (2, f"checkflow: {wanted}"), ran.stderr
    assert "Traceback" not in ran.stderr and not list(tmp_path.iterdir())


def test_a_module_that_is_none_of_these_is_a_mistake_of_ours(tmp_path: Path) -> None:
    """Nothing to install would help."""
    broken = "sys.modules['checkflow.units'] = None; from checkflow.__main__ import main; main()"
    ran = hiding("", broken, ["list", "."], tmp_path)
    assert ran.returncode == 70 and "internal error, please report it (ModuleNotFoundError" in ran.stderr


def test_a_sweep_says_it_of_its_cells(tmp_path: Path) -> None:
    """A worker that lacks a package has a row without an answer, and goes on."""
    arguments = ["sweep", str(ROOT / "graphs" / "alexnet-1.json"), "--formulation", "compact", "--json"]
    (tmp_path / "scipy.py").write_text("raise ModuleNotFoundError('not here', name='scipy')\n")
    there = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "checkflow", *arguments]
    ran = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": there}, capture_output=True, text=True)
    assert ran.returncode == 1 and "scipy is not installed: pip install 'scipy>=1.12'" in ran.stdout
    assert "internal error" not in ran.stdout + ran.stderr
