"""One small graph, and plans and schedules of it whose every figure was worked out on paper.

Each of the four steps takes 10 ns. At 10 GB/s the link moves 100 bytes in a step, at 4 GB/s it moves 40.

    step      1       2       3       4        window (release..deadline)
    a   100           read    write   write     0..2
    b   150   write                            -3..0
    c    50                           write     0..3
    frozen 64 is state that nothing writes
    x   200   ------------
    y   300                   -----
    resident  564     564     664     364
    anchors at positions 0, 2 and 4
"""

from __future__ import annotations

from checkflow.graph import Anchor, AnchorKind, Graph, Op, Role, Tensor, View
from checkflow.graphfile import graph_fingerprint, state_fingerprint
from checkflow.schedule import ActionRow, AnchorRow, Certificate, Schedule, StateRow, ViewRow, sealed

A, B, C, FROZEN, X, Y = range(6)


def _state(name: str, role: Role, size: int) -> Tensor:
    return Tensor(name, role, size, 0, 4, (View(name, "uint8", (size,)),))


GRAPH = Graph(
    model="handmade",
    arguments=(("batch_size", "2"),),
    device="paper",
    traced_on="cpu",
    ops=(
        Op("aten.add_.Tensor", (B,), (B, X), 0, 0, "float32", 10),
        Op("aten.mul.Tensor", (A, X), (), 200, 300, "float32", 10),
        Op("aten.add_.Tensor", (A,), (A, Y), 0, 0, "float32", 10),
        Op("aten._fused_adam_.default", (A, C), (A, C), 0, 0, "float32", 10),
    ),
    tensors=(
        _state("model/a", Role.PARAMETER, 100),
        _state("model/b", Role.BUFFER, 150),
        _state("optimizer/a.c", Role.OPTIMIZER, 50),
        _state("model/frozen", Role.PARAMETER, 64),
        Tensor("x", Role.ACTIVATION, 200, 1, 2),
        Tensor("y", Role.GRADIENT, 300, 3, 3),
    ),
    anchors=(
        Anchor(AnchorKind.FORWARD_PRE, "model", 1, 0),
        Anchor(AnchorKind.GRADIENT, "model/a", 1, 2),
        Anchor(AnchorKind.ITERATION_END, "", 1, 4),
    ),
    host_state_bytes=8,
)

STATE = (
    StateRow(id=A, bytes=100, written=True, views=(ViewRow(name="model/a", dtype="uint8", shape=(100,)),)),
    StateRow(id=B, bytes=150, written=True, views=(ViewRow(name="model/b", dtype="uint8", shape=(150,)),)),
    StateRow(id=C, bytes=50, written=True, views=(ViewRow(name="optimizer/a.c", dtype="uint8", shape=(50,)),)),
    StateRow(id=FROZEN, bytes=64, written=False, views=(ViewRow(name="model/frozen", dtype="uint8", shape=(64,)),)),
)
ANCHORS = (
    AnchorRow(kind="forward_pre", subject="model", occurrence=1, position=0),
    AnchorRow(kind="gradient", subject="model/a", occurrence=1, position=2),
    AnchorRow(kind="iteration_end", subject="", occurrence=1, position=4),
)

# 10 GB/s, every iteration: all three leave before they are overwritten, no snapshot at all.
EASY = sealed(
    Schedule(
        graph_fingerprint=graph_fingerprint(GRAPH),
        state_fingerprint=state_fingerprint(GRAPH),
        model="handmade",
        arguments=(("batch_size", "2"),),
        device="paper",
        traced_on="cpu",
        formulation="direct",
        transfers="streaming",
        interval=1,
        bandwidth_bytes_per_s=10_000_000_000,
        slack_ppm=0,
        chunk_bytes=None,
        granule_bytes=10,
        memory_limit_bytes=None,
        steps=4,
        iteration_time_ns=40,
        state_bytes=300,
        static_state_bytes=64,
        certificate=Certificate(
            training_peak_bytes=664,
            peak_bytes=664,
            lower_bound_bytes=664,
            ideal_peak_bytes=664,
            gap=0.0,
            snapshot_bytes=0,
            solver="none",
            solver_why="the plan meets the bound",
        ),
        state=STATE,
        anchors=ANCHORS,
        actions=(
            # link, in bytes from position 0: the previous checkpoint ends at 150 - 400 = -250
            ActionRow(tensor=B, offset=0, bytes=150, offload=(0, 2)),  # -200..-50
            ActionRow(tensor=A, offset=0, bytes=100, offload=(0, 3)),  # 0..100
            ActionRow(tensor=C, offset=0, bytes=50, offload=(0, 3)),  # 100..150
        ),
    )
)

# 4 GB/s, every second iteration: the link moves 320 bytes in a period, and what misses its deadline is snapshot.
# Left at position 2: 70 bytes of b, a and c less the 80 that moved, so the bound is 664 + 140 at step 3. With an anchor
# at 3, c would be due there, and all of b would have moved by 0 but 30 bytes: 664 + 50.
TIGHT = sealed(
    EASY.model_copy(
        update={
            "interval": 2,
            "bandwidth_bytes_per_s": 4_000_000_000,
            "certificate": EASY.certificate.model_copy(
                update={
                    "peak_bytes": 804,
                    "lower_bound_bytes": 804,
                    "ideal_peak_bytes": 714,
                    "snapshot_bytes": 210,
                }
            ),
            "actions": (
                # the previous checkpoint ends at 220 - 320 = -100; held at steps 1-2: 70, 3-6: 90 + 50
                ActionRow(tensor=B, offset=0, bytes=80, offload=(0, 2)),  # -80..0
                ActionRow(tensor=B, offset=80, bytes=70, snapshot=(0, 3), offload=(0, 3), release=(1, 2)),  # 0..70
                ActionRow(tensor=A, offset=0, bytes=10, offload=(0, 3)),  # 70..80
                ActionRow(tensor=A, offset=10, bytes=90, snapshot=(1, 2), offload=(1, 2), release=(2, 2)),  # 80..170
                ActionRow(tensor=C, offset=0, bytes=50, snapshot=(1, 2), offload=(1, 2), release=(2, 2)),  # 170..220
            ),
        }
    )
)

# 4 GB/s, every iteration: 300 bytes take 75 ns, of which training stands still for 55 at position 2. b, which is due at
# 0, is copied, and its copy is held at steps 1-2: 564 + 150. Who may stand still needs no byte, so the bound is 664.
PAUSED = sealed(
    EASY.model_copy(
        update={
            "bandwidth_bytes_per_s": 4_000_000_000,
            "certificate": EASY.certificate.model_copy(
                update={"peak_bytes": 714, "gap": 50 / 664, "snapshot_bytes": 150, "pause_ns": 55}
            ),
            "actions": (
                ActionRow(tensor=B, offset=0, bytes=150, snapshot=(0, 3), offload=(0, 3), release=(1, 2)),  # 0..150
                ActionRow(tensor=A, offset=0, bytes=100, offload=(0, 3)),  # 150..250
                ActionRow(tensor=C, offset=0, bytes=50, offload=(0, 3)),  # 250..300
            ),
            "policy": "checkfreq",
            "pause": (1, 2),
        }
    )
)
