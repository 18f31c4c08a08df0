"""Model files for sweeps: their text, since a sweep runs files."""

from __future__ import annotations

from checkflow.sweep.cells import Answer, Row

LINEAR = """
import checkflow, torch
def training(batch_size: int = 2, width: int = 64) -> checkflow.Training:
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def iteration():
        model(torch.ones(batch_size, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return checkflow.Training(model, optimizer, iteration)
"""


def beginning(text: str) -> str:
    """LINEAR with lines at the beginning of its factory."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    return LINEAR.replace("    model = ", f"{lines}    model = ", 1)


def untimed(answer: Answer) -> Answer:
    """The answer without the time that planning took."""
    if isinstance(answer, Row):
        return answer.model_copy(update={"plan_s": None})
    rows = {name: getattr(answer, name) for name in ("found", "fails")}
    return answer.model_copy(update={name: row and untimed(row) for name, row in rows.items()})
