"""torch_geometric: message passing on a random graph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GIN, ChebConv, GraphSAGE, SchNet, TransformerConv, global_mean_pool
from torch_geometric.nn.norm import GraphNorm

import checkflow
from third_parties.case import Case, named, trained

NODES, EDGES = 30, 90
KINDS = {"gcn": GCN, "gat": GAT, "gin": GIN, "sage": GraphSAGE}


def nodes(name: str) -> checkflow.Training:
    torch.manual_seed(0)
    model: nn.Module = KINDS[name](8, 16, num_layers=2, out_channels=4, dropout=0.3)
    edges = torch.randint(NODES, (2, EDGES))

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(torch.randn(NODES, 8), edges), torch.randint(4, (NODES,)))

    return trained(model, loss)


class Deep(nn.Module):
    """Spectral and attention convolutions, a norm of graphs, a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = ChebConv(8, 16, K=3), GraphNorm(16)
        self.second, self.last = TransformerConv(16, 8, heads=2), nn.Linear(16, 4)

    def forward(self, x: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        hidden = self.norm(self.first(x, edges), batch, 3).relu()
        answer: Tensor = self.last(global_mean_pool(self.second(hidden, edges), batch, 3))
        return answer


def deep() -> checkflow.Training:
    torch.manual_seed(0)
    model, edges = Deep(), torch.randint(NODES, (2, EDGES))
    batch = torch.arange(NODES) // 10
    return trained(
        model,
        lambda: nn.functional.cross_entropy(model(torch.randn(NODES, 8), edges, batch), torch.randint(4, (3,))),
    )


def molecules() -> checkflow.Training:
    torch.manual_seed(0)

    def near(positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        """All pairs of the one molecule, for the package's own search for neighbours is compiled apart."""
        count = positions.shape[0]
        first, second = torch.meshgrid(torch.arange(count), torch.arange(count), indexing="ij")
        away = (first != second).flatten()
        pairs = torch.stack((first.flatten()[away], second.flatten()[away]))
        return pairs, (positions[pairs[0]] - positions[pairs[1]]).norm(dim=-1)

    model = SchNet(hidden_channels=16, num_filters=16, num_interactions=2, num_gaussians=8, interaction_graph=near)
    return trained(model, lambda: model(torch.randint(1, 9, (6,)), torch.randn(6, 3)).square().mean())


CASES: tuple[Case, ...] = (
    *named(nodes, gcn=("gcn",), gat=("gat",), gin=("gin",), sage=("sage",)),
    Case("deep", deep),
    Case("schnet", molecules),
)
