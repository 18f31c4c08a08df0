"""What a schedule says of its policy and of what it lacks, against its graph and what each policy may have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from handmade import EASY, GRAPH, PAUSED, TIGHT
from mutants import SETTINGS

from checkflow import policies
from checkflow.compiler import Compiled, compile_graph
from checkflow.errors import VerificationError
from checkflow.graph import Graph
from checkflow.graphfile import graph_fingerprint
from checkflow.schedule import Schedule, UnlistedRow, sealed
from checkflow.unlisted import Unlisted
from checkflow.verify import policy, verify

CARRIED = replace(GRAPH, unlisted=(Unlisted("h.0", 128, "train.py:31"), Unlisted("scale", 4, "", scaler=True)))
ROWS = (UnlistedRow(name="h.0", bytes=128, where="train.py:31"), UnlistedRow(name="scale", bytes=4, scaler=True))


def compiled(setting: str) -> tuple[Schedule, Graph]:
    made = compile_graph(SETTINGS[setting].graph, SETTINGS[setting].options)
    assert isinstance(made, Compiled)
    return made.schedule, made.graph


def refused(schedule: Schedule, graph: Graph, message: str, **fields: object) -> None:
    """The schedule passes, and with other fields it does not."""
    verify(schedule, graph)
    with pytest.raises(VerificationError, match=message) as raised:
        verify(sealed(schedule.model_copy(update=fields)), graph)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((), "unlisted: the schedule has 0, its graph 2"),
        (ROWS[:1], "unlisted: the schedule has 1, its graph 2"),
        ((*ROWS, ROWS[0]), "unlisted: the schedule has 3, its graph 2"),
        ((ROWS[1], ROWS[0]), "unlisted row 0: "),
        ((ROWS[0], ROWS[1].model_copy(update={"name": "other"})), "unlisted row 1: "),
        ((ROWS[0].model_copy(update={"bytes": 4}), ROWS[1]), "unlisted row 0: "),
        ((ROWS[0].model_copy(update={"where": ""}), ROWS[1]), "unlisted row 0: "),
        ((ROWS[0], ROWS[1].model_copy(update={"scaler": False})), "unlisted row 1: "),
    ],
)
def test_what_checkpoints_lack_is_not_kept_back(rows: tuple[UnlistedRow, ...], message: str) -> None:
    """Each storage that the graph carries on unlisted is in the schedule, as it is."""
    schedule = EASY.model_copy(update={"graph_fingerprint": graph_fingerprint(CARRIED), "unlisted": ROWS})
    refused(sealed(schedule), CARRIED, message, unlisted=rows)


def test_what_the_graph_does_not_lack_is_not_made_up() -> None:
    """A row of nothing is refused, too."""
    refused(EASY, GRAPH, "unlisted: the schedule has 1, its graph 0", unlisted=ROWS[:1])


def test_each_policy_that_there_is_has_its_way() -> None:
    """The verifier's own list has all of them, and no other."""
    assert tuple(sorted(policy.HAS)) == policies.names()


def test_a_policy_that_there_is_not_is_refused() -> None:
    """The line names those there are."""
    there = ", ".join(policies.names())
    refused(TIGHT, GRAPH, f"policy: there is no 'nonsense'; those there are: {there}$", policy="nonsense")


@pytest.mark.parametrize("name", policies.names())
def test_a_plan_of_the_whole_may_be_of_any_policy(name: str) -> None:
    """That is what each does where it has nothing to do in its own way, or nothing to wait for."""
    verify(sealed(TIGHT.model_copy(update={"policy": name})), GRAPH)


WAYS = {
    "parts": (policy.PARTS, {"gockpt"}),
    "lanes": (policy.LANES, {"rolling", "lowdiff"}),
    "base": (policy.LANES, {"rolling", "lowdiff"}),
    "replica": (policy.REPLICA, {"lowdiff_plus"}),
    "synchronous": (policy.PAUSE, {"synchronous", "checkfreq_cpu", "checkfreq"}),
    "checkfreq": (policy.PAUSE, {"synchronous", "checkfreq_cpu", "checkfreq"}),
}


@pytest.mark.parametrize("setting", WAYS)
def test_what_a_schedule_does_is_what_its_policy_may_do(setting: str) -> None:
    """Under the name of a policy that does nothing of the kind it is refused."""
    schedule, graph = compiled(setting)
    what, own = WAYS[setting]
    assert schedule.policy in own
    for name in policies.names():
        if name in own:
            verify(sealed(schedule.model_copy(update={"policy": name})), graph)
        else:
            refused(schedule, graph, f"policy: the schedule has {what}, and '{name}' has none", policy=name)


@pytest.mark.parametrize("fields", [{"formulation": "compact", "transfers": "packed"}, {"transfers": "packed"}])
def test_no_other_policy_has_a_formulation(fields: dict[str, object]) -> None:
    """The paper's are for checkflow's own plans; other policies stream."""
    refused(PAUSED, GRAPH, "policy: 'checkfreq' is always direct and streaming, not .* and packed", **fields)


def test_lanes_go_with_a_checkpoint_each_iteration() -> None:
    """At a longer interval the iterations between would be of no lane."""
    schedule, graph = compiled("base")
    refused(schedule, graph, "lanes: 2 go with an interval of 1, not 2", interval=2)


def test_a_replica_without_gradients_is_refused() -> None:
    """Rows of the whole state leave nothing for the host to do."""
    schedule, graph = compiled("rolling, whole")
    whole = sealed(schedule.model_copy(update={"policy": "lowdiff_plus"}))
    refused(whole, graph, "replica: there is no gradient", replica=True)
