"""The same on CUDA, where there is one: generators, GradScaler without a wait, and steps on the host or the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from resume_memory import load, save
from test_resume_equality import advance, bits, seed
from torch import nn
from trainings_to_resume import Run

from checkflow.state.host.capture import HostState
from checkflow.state.host.objects import HostObjects
from checkflow.state.live import live_state
from checkflow.training import Training

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "looped": lambda p: torch.optim.AdamW(p, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, capturable=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "sgd": lambda p: torch.optim.SGD(p, momentum=0.9, lr=0.1),
}


def run_on(device: str, make: Optimizer) -> Run:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2)).to(device)
    optimizer = make(list(net.parameters()))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**127, growth_interval=2)
    run = Run(Training(net, optimizer, lambda: None), HostObjects.of(scaler=scaler), iter(()))

    def steps() -> Iterator[None]:
        while True:
            loss = net(torch.randn(4, 4, device=device)).square().mean()
            torch.autograd.backward(scaler.scale(loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield

    run.steps = steps()
    return run


def ending(run: Run) -> dict[str, object]:
    found: dict[str, object] = {live.name: bits(live.tensor.cpu()) for live in live_state(run.training)}
    found["devices"] = {live.name: live.tensor.device for live in live_state(run.training)}
    found["scaler"] = run.objects.objects["scaler"].state_dict()
    return found | {"cuda": torch.rand(2, device="cuda").tolist(), "cpu": torch.rand(2).tolist()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 4])
def test_a_resumed_run_ends_as_one_never_interrupted_on_cuda(name: str, at: int) -> None:
    """Bit for bit, each state tensor on the device where it was."""
    seed(1)
    whole = run_on("cuda", OPTIMIZERS[name])
    advance(whole, 9)
    expected = ending(whole)
    seed(1)
    first = run_on("cuda", OPTIMIZERS[name])
    advance(first, at)
    saved = save(first.training, first.objects, at)
    seed(2)
    second = run_on("cuda", OPTIMIZERS[name])
    load(saved, second.training, second.objects)
    advance(second, 9 - at)
    assert ending(second) == expected


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"capturable"}))  # which is CUDA's alone
def test_a_checkpoint_made_on_the_cpu_goes_on_on_cuda(name: str) -> None:
    """State lies where this device's optimizer wants it: steps on the host unless fused or capturable."""
    seed(1)
    run = run_on("cpu", OPTIMIZERS[name])
    while not run.training.optimizers[0].state:  # the first updates are skipped
        advance(run, 1)
    saved = save(run.training, run.objects, 1)
    other = run_on("cuda", OPTIMIZERS[name])
    load(saved, other.training, other.objects)
    kept = {live.name: live.tensor.cpu() for live in live_state(run.training)}
    assert all(torch.equal(live.tensor.cpu(), kept[live.name]) for live in live_state(other.training))
    advance(other, 1)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # that it does not find all of them
def test_capturing_a_scaler_does_not_wait_for_the_device() -> None:
    """torch's own check for synchronizing calls stays silent, and the record holds the scale as the queue leaves it."""
    run = run_on("cuda", OPTIMIZERS["fused"])
    advance(run, 2)
    names = {live.name for live in live_state(run.training)}
    state = HostState(run.training, run.objects, stored=names.__contains__, fingerprints={})
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        captured = state.capture(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert f'"scale":{run.objects.objects["scaler"].state_dict()["scale"]}' in captured.record().decode()
