"""What the trace believes about writes, against the bytes that operators really change."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from data_dependent import DATA_DEPENDENT
from trainings import FEATURES

from checkflow import models
from checkflow.models._optimizers import OPTIMIZERS
from checkflow.trace.writes import UNDECLARED, WriteChecker, check_writes, traits, written

NETWORKS = ("alexnet", "bert", "gpt2", "llama_1b", "mnasnet", "resnet", "resnet3d", "transformer", "vgg", "vit")


@pytest.mark.parametrize("name", [*FEATURES, *DATA_DEPENDENT])
def test_no_operator_of_a_feature_writes_in_secret(name: str) -> None:
    """Bytes before and after each operator of two iterations differ only where `written` says."""
    factory = (FEATURES | DATA_DEPENDENT)[name]
    with WriteChecker() as checker:
        training = factory()
        training.iteration()
        training.iteration()
    assert len(checker.findings.operators) > 10
    assert not checker.findings.undeclared


@pytest.mark.parametrize("name", NETWORKS)
def test_no_operator_of_a_network_writes_in_secret(name: str) -> None:
    """The same for the bundled networks."""
    training = partial(models.factory(name), batch_size=2, small=True)()
    with WriteChecker() as checker:
        training.iteration()
    assert not checker.findings.undeclared


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_operator_of_an_optimizer_writes_in_secret(optimizer: str) -> None:
    """The same for every optimizer that the bundled networks offer."""
    with WriteChecker() as checker:
        training = models.factory("transformer")(batch_size=2, optimizer=optimizer, small=True)
        training.iteration()
        training.iteration()
    assert not checker.findings.undeclared


def test_the_checker_finds_what_the_table_knows() -> None:
    """Without the table, batch norm's running statistics are a finding: the schema is silent about them."""
    op = torch.ops.aten.native_batch_norm.default
    x, mean, var = torch.randn(5, 3), torch.zeros(3), torch.ones(3)
    args = (x, None, None, mean, var, True, 0.1, 1e-5)
    assert written(op, args, {}) == {"running_mean", "running_var"}
    assert written(op, (*args[:5], False, *args[6:]), {}) == frozenset()
    entry = UNDECLARED.pop("aten::native_batch_norm")
    traits.cache_clear()
    try:
        _, changed = check_writes(op, args, {})
    finally:
        UNDECLARED["aten::native_batch_norm"] = entry
        traits.cache_clear()
    assert changed == ("running_mean", "running_var")


def test_the_table_names_real_operators_and_arguments() -> None:
    """Every entry is an operator of this torch, with these arguments."""
    for name, (arguments, flag) in UNDECLARED.items():
        schemas = torch._C._jit_get_schemas_for_operator(name)
        assert schemas, name
        given = {argument.name for schema in schemas for argument in schema.arguments}
        assert {*arguments, flag} - {""} <= given, name


def test_a_fused_optimizer_writes_steps_only_with_found_inf() -> None:
    """The fused kernels undo the step count where the gradients are not finite."""
    op = torch.ops.aten._fused_adamw_.default
    names = traits(op).names
    assert "state_steps" not in written(op, [[]] * 6, {})
    assert "state_steps" in written(op, [[]] * 6, {"found_inf": torch.ones(1)})
    assert "state_steps" in names
