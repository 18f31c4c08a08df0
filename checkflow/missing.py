"""Packages that checkflow needs and that are not installed: bad input, which a line names with what to type."""

from __future__ import annotations

# By the module that is imported; a test compares them with pyproject.toml, as an installation's own need not be there.
REQUIREMENTS = {
    "torch": "torch>=2.9",
    "numpy": "numpy>=1.26",
    "scipy": "scipy>=1.12",
    "highspy": "highspy>=1.10",
    "gurobipy": "gurobipy>=12",
    "pulp": "pulp>=2.9,<4",
    "networkx": "networkx>=3.2",
    "yaml": "pyyaml>=6",
    "pydantic": "pydantic>=2.7",
    "xxhash": "xxhash>=3.4",
    "rich": "rich>=13.7",
    "click": "click>=8.1",
}


def not_installed(error: BaseException) -> str | None:
    """What to install where one of these could not be found; None of another error or module, or one that is broken."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in REQUIREMENTS:
        return None
    return f"{error.name} is not installed: pip install '{REQUIREMENTS[error.name]}'"
