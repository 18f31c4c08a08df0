"""Run a traced program on the real tensors of a training."""

from __future__ import annotations

import torch

from checkflow.errors import TraceError
from checkflow.state.live import parameters_of
from checkflow.torch_internals import below_autograd
from checkflow.trace.reachable import sources_of
from checkflow.trace.tracing import Traced
from checkflow.training import Training


def replay(traced: Traced, training: Training) -> None:
    """Change a training's tensors in place as its next eager iteration would.

    The training comes from the factory that was traced and has run one iteration; random numbers come from the default
    generators as they are. Raises TraceError where it lacks an input of the program, or the program was not kept.
    """
    model, program = traced.graph.model, traced.program
    if program is None:
        raise TraceError(f"{model}: its program was not kept; trace it with trace_training(..., program=True)")
    sources = sources_of(training, model)
    inputs = []
    for node in program.graph.find_nodes(op="placeholder"):
        source = node.meta["source"]
        if source not in sources:
            raise TraceError(
                f"{model}: input %{node.name} {f'({source}) ' if source else ''}of the program cannot be found in this "
                "training; let the iteration reach it by a variable, or pass the training that was traced"
            )
        inputs.append(sources[source])
    with below_autograd():  # the program is what autograd called
        left = _Replay(program).run(*inputs)
    output = program.graph.output_node()
    gradients = dict(zip(output.meta["gradients"], left, strict=True))
    for name, parameter in parameters_of(training):
        parameter.grad = gradients.get(name)


class _Replay(torch.fx.Interpreter):
    def run_node(self, n: torch.fx.Node) -> object:
        with torch.set_grad_enabled(bool(n.meta.get("grad_enabled"))):
            return super().run_node(n)
