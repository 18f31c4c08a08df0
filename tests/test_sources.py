"""How a model file is loaded, and how --set's text becomes arguments."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkflow import sources
from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT, InputError, ModelFileError

MODEL = """
from __future__ import annotations
import torch
def training(batch_size: int = 2, lr: float = 1e-3, bias: bool = True, extra=None) -> checkflow.Training:
    import checkflow
    import {sibling}
    made = (batch_size, lr, bias, extra, {sibling}.WIDTH)
    model = torch.nn.Linear(2, 2)
    model.made = made
    return checkflow.Training(model, torch.optim.SGD(model.parameters()), lambda: None)
"""


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., object]:
    """What the factory of a model file, whose names stand only inside it, is called with."""
    (tmp_path / f"sibling_of_{tmp_path.name}.py").write_text("WIDTH = 7\n")
    (tmp_path / "model.py").write_text(MODEL.format(sibling=f"sibling_of_{tmp_path.name}"))

    def make(**settings: str) -> object:
        return sources.load(str(tmp_path / "model.py"), settings).factory().models[0].made

    return make


def test_a_factory_imports_its_neighbours_when_it_runs(made: Callable[..., object]) -> None:
    """As under `python model.py`, also where annotations name what only the factory imports."""
    assert made() == (2, 1e-3, True, None, 7)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr": "3e-4"}, (2, 3e-4, True, None, 7)),
        ({"lr": "1"}, (2, 1.0, True, None, 7)),
        ({"batch_size": "010"}, (10, 1e-3, True, None, 7)),
        ({"bias": "false"}, (2, 1e-3, False, None, 7)),
        ({"extra": "[1, a]"}, (2, 1e-3, True, [1, "a"], 7)),
    ],
)
def test_arguments_are_converted(settings: dict[str, str], expected: object, made: Callable[..., object]) -> None:
    """Numbers as Python reads them, anything that is not annotated as YAML."""
    assert made(**settings) == expected


@pytest.mark.parametrize(
    ("declared", "text", "expected"),
    [
        ("a", "1e-3", 1e-3),
        ("a=None", "-2E5", -2e5),
        ("a=None", "1e-3x", "1e-3x"),
        ("a: Optional[float] = None", "1e-3", 1e-3),
        ("a: 'float | None' = None", "2", 2.0),
        ("a: 'float | None' = 1.0", "null", None),
        ("a: 'int | float' = 1", "1e3", 1e3),
        ("a: 'str | None' = None", "no", "no"),
        ("a: 'str | None' = None", "12", "12"),
        ("a: 'str | bool' = ''", "no", "no"),
        ("a: 'str | bool' = ''", "true", True),
        ("a: Path = Path('x')", "a.yaml", Path("a.yaml")),
        ("a=Path('x')", "7", Path("7")),
        ("a: Literal['on', 'off'] = 'on'", "off", "off"),
        ("a: list[int] = []", "[1, 2]", [1, 2]),
        ("a: 'Unknown' = 1", "2", 2),
        ("a, /", "3", 3),
        ("b=5, a=6, /", "3", 3),
        ("**a", "1", {"a": 1}),
    ],
)
def test_a_value_is_what_its_argument_is_declared_as(
    declared: str, text: str, expected: object, tmp_path: Path
) -> None:
    """Of a union the first that the text can be: a text that may be anything else is text last."""
    imports = "from pathlib import Path\nfrom typing import Literal, Optional\n"
    (tmp_path / "model.py").write_text(f"{imports}def training({declared}):\n    raise RuntimeError(a)\n")
    with pytest.raises(RuntimeError) as caught:
        sources.load(str(tmp_path / "model.py"), {"a": text}).factory()
    assert caught.value.args == (expected,) and type(caught.value.args[0]) is type(expected)


@pytest.mark.parametrize(
    ("declared", "text", "why"),
    [
        ("a: 'float | None' = None", "fast", "--set a: 'fast' is not of type float or None; give one"),
        ("a: list[int] = []", "3", "--set a: '3' is not of type list; give one"),
        ("a: torch.dtype = torch.float32", "float16", "--set a: 'float16' is not of type dtype; give one"),
        ("*a", "3", "--set a: model.py has no argument 'a'; it takes no arguments"),
    ],
)
def test_what_an_argument_cannot_be_is_refused(declared: str, text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(f"import torch\ndef training({declared}):\n    pass\n")
    with pytest.raises(InputError) as caught:
        sources.load(str(tmp_path / "model.py"), {"a": text})
    assert str(caught.value).startswith(why)


@pytest.mark.filterwarnings("error")
def test_a_factory_that_is_a_coroutine_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("async def training():\n    pass\n")
    with pytest.raises(ModelFileError, match="its factory returned coroutine; return"):
        sources.load(str(tmp_path / "model.py"), {}).factory()


def test_a_value_error_on_import_is_told_as_such(tmp_path: Path) -> None:
    """It is the file's own, with its line, and does not count as a file that is no Python."""
    path = tmp_path / "model.py"
    path.write_text("x = 1\nint('seven')\n")
    with pytest.raises(ModelFileError, match=r"model\.py:2: importing it raised ValueError"):
        sources.load(str(path), {})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os\nos.environ['NOT_SET']", "asks for the environment variable NOT_SET, which is not set; set it"),
        ("x = 1\nraise GeneratorExit('x')", "importing it raised GeneratorExit: x; correct the file"),
        (
            "from torch import distributed\ndistributed.init_process_group('gloo')",
            "asks for torch.distributed's processes; give --world-size",
        ),
    ],
)
def test_what_importing_it_asks_for_is_named(
    text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path = tmp_path / "model.py"
    path.write_text(text)
    with pytest.raises(ModelFileError) as caught:
        sources.load(str(path), {})
    assert str(caught.value).startswith(f"{path}:2: {why}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"a\0b", r"model\.py: is not Python source"),
        (
            b"x = 1\nfrom .other import y\n",
            r"model\.py:2: .* relative import .*; import what lies beside it by its name",
        ),
    ],
)
def test_what_is_no_module_of_its_own_is_told(text: bytes, why: str, tmp_path: Path) -> None:
    """Of a package, or no Python at all."""
    path = tmp_path / "model.py"
    path.write_bytes(text)
    with pytest.raises(ModelFileError, match=why):
        sources.load(str(path), {})


def test_a_file_does_not_see_the_command_line_of_checkflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is alone on its own; one that needs more is told where a factory has it from."""
    given = ["checkflow", "compile", "model.py", "--batch-size", "4"]
    monkeypatch.setattr("sys.argv", given)
    path = tmp_path / "model.py"
    path.write_text("import sys\nSEEN = sys.argv\ndef training():\n    raise RuntimeError(SEEN, sys.argv)\n")
    with pytest.raises(RuntimeError) as caught:
        sources.load(str(path), {}).factory()
    assert caught.value.args == ([str(path)],) * 2 and sys.argv == given
    path.write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--x', required=True)\np.parse_args()\n"
    )
    missed = r"SystemExit: the following arguments are required: --x; its command line .*--set"
    with pytest.raises(ModelFileError, match=rf"model\.py:4: importing it raised {missed}"):
        sources.load(str(path), {})
    assert sys.argv == given


MISSES = """
import argparse, sys
def read():
    parser = argparse.ArgumentParser()
    parser.add_argument("--x", required=True)
    return parser.parse_args()
print("a word of its own", file=sys.stderr)
"""


def test_the_usage_of_a_file_is_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is of no command that anybody typed. What the file prints by itself is, and it may go on without."""
    (tmp_path / "model.py").write_text(MISSES + "read()\n")
    assert run(["compile", str(tmp_path / "model.py")]) == EXIT_BAD_INPUT
    own, line = capfd.readouterr().err.splitlines()
    assert own == "a word of its own" and "the following arguments are required: --x" in line
    (tmp_path / "model.py").write_text(MISSES + "def training():\n    read()\n")
    assert run(["compile", str(tmp_path / "model.py")]) == EXIT_BAD_INPUT
    own, _building, line = capfd.readouterr().err.splitlines()
    assert own == "a word of its own" and line.endswith(f"--x at {tmp_path / 'model.py'}:6; correct it there")
    (tmp_path / "model.py").write_text(
        MISSES + "try:\n    read()\nexcept SystemExit as ended:\n    CODE = ended.code\n"
    )
    with pytest.raises(ModelFileError, match="has no function 'CODES'"):
        sources.load(f"{tmp_path / 'model.py'}:CODES", {})
    assert capfd.readouterr().err == "a word of its own\n"


PACKAGE = {
    "owner/__init__.py": "",
    "owner/inner/__init__.py": "",
    "owner/layers.py": "WIDTH = 7\n",
    "owner/inner/beside.py": "from ..layers import WIDTH\n",
    "owner/inner/whole.py": "from owner.inner.beside import WIDTH\ndef training():\n    raise RuntimeError(WIDTH)\n",
    "owner/inner/relative.py": "from .beside import WIDTH\n",
    "owner/inner/named.py": "import beside\n",
}


def test_a_module_of_a_package_imports_by_whole_names(tmp_path: Path) -> None:
    """Wherever the command was started, and by whichever of its names; what is refused says which name would do."""
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    inner = tmp_path / "owner" / "inner"
    with sources.users_modules(), pytest.raises(RuntimeError, match=r"^7$"):
        sources.load(str(inner / "whole.py"), {}).factory()
    for name in ("relative", "named"):
        with sources.users_modules(), pytest.raises(ModelFileError, match=rf"{name}\.py:1: .* relative") as told:
            sources.load(str(inner / f"{name}.py"), {})
        assert str(told.value).endswith("; import what lies beside it by its whole name, owner.inner.NAME")


def test_a_module_is_told_from_a_file() -> None:
    with pytest.raises(ModelFileError, match=r"^pkg\.rel: is no file; give a module as one, like pkg/rel\.py, without"):
        sources.load("pkg.rel:training", {})


def test_a_name_that_is_not_text_is_written_so_that_it_is(tmp_path: Path) -> None:
    """Files are UTF-8; what a directory says need not be."""
    path = tmp_path / os.fsdecode(b"bad\xff.py")
    path.write_text("def training():\n    pass\n")
    assert sources.load(str(path), {}).name == r"bad\xff.py"
