"""What torch keeps to itself and checkflow needs is there, does what is said of it, and is named in two files."""

from __future__ import annotations

import ast
import importlib
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGE = Path(__file__).parent.parent / "checkflow"
INTERNALS = [PACKAGE / "torch_internals.py", PACKAGE / "torch_ranks.py"]


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)


@contextmanager
def _alone() -> Iterator[None]:
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _ddp() -> torch.nn.parallel.DistributedDataParallel:
    with _alone():
        return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))


def _zero() -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch's own imports warn of what torch deprecates
        zero = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    with _alone():
        return zero([torch.nn.Parameter(torch.zeros(2))], optimizer_class=torch.optim.SGD, lr=0.1)


def _loader() -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(1)))


def _planner() -> Any:
    return importlib.import_module("torch.distributed.checkpoint.default_planner").DefaultSavePlanner()


def _wrapped(by: str) -> Any:
    wrappers = importlib.import_module("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return getattr(wrappers, by)(torch.nn.ReLU())


def _fsdp() -> Any:
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh
    with _alone():
        model = torch.nn.Linear(1, 1)
        importlib.import_module("torch.distributed.fsdp").fully_shard(model, mesh=mesh("cpu", (1,)))
        return model


# Attribute -> objects that have it.
SAMPLES: dict[str, Callable[[], tuple[object, ...]]] = {
    "_amp_foreach_non_finite_check_and_unscale_": lambda: (torch,),
    "_version": lambda: (torch.zeros(1),),
    "_backward_hooks": lambda: (torch.zeros(1),),
    "_cdata": lambda: (torch.zeros(1).untyped_storage(), torch.Generator()),
    "_modules": lambda: (torch.nn.ReLU(),),
    "_parameters": lambda: (torch.nn.ReLU(),),
    "_buffers": lambda: (torch.nn.ReLU(),),
    "_non_persistent_buffers_set": lambda: (torch.nn.ReLU(),),
    "_orig_mod": lambda: (torch.compile(torch.nn.ReLU(), backend="eager"),),
    "_checkpoint_wrapped_module": lambda: (_wrapped("checkpoint_wrapper"), _wrapped("offload_wrapper")),
    "_optimizer_step_pre_hooks": lambda: (_optimizer(),),
    "_optimizer_step_post_hooks": lambda: (_optimizer(),),
    "_optimizer_load_state_dict_pre_hooks": lambda: (_optimizer(),),
    "_optimizer_load_state_dict_post_hooks": lambda: (_optimizer(),),
    "_optimizer_state_dict_post_hooks": lambda: (_optimizer(),),
    "_scale": lambda: (torch.amp.GradScaler("cpu"),),
    "_growth_tracker": lambda: (torch.amp.GradScaler("cpu"),),
    "_iterator": lambda: (_loader(),),
    "_index_sampler": lambda: (_loader(), iter(_loader())),
    "_num_yielded": lambda: (iter(_loader()),),
    "_schema": lambda: (torch.ops.aten.add.Tensor,),
    "_can_decompose": lambda: (torch.ops.aten.add.Tensor,),
    "_foreach_copy_": lambda: (torch,),
    "_C": lambda: (torch,),
    "_register_comm_hook": lambda: (torch.distributed,),
    "_compute_bucket_assignment_by_size": lambda: (torch.distributed,),
    "_DEFAULT_FIRST_BUCKET_BYTES": lambda: (torch.distributed,),
    "_rebuild_buckets": lambda: (torch.distributed.Reducer,),  # type: ignore[attr-defined]
    "_verify_param_shape_across_processes": lambda: (torch.nn.parallel.distributed,),
    "_sync_module_states": lambda: (torch.nn.parallel.distributed,),
    "_local_tensor": lambda: (importlib.import_module("torch.distributed.tensor").DTensor,),
    "_comm_hooks": lambda: (_ddp(),),
    "_module_parameters": lambda: (_ddp(),),
    "_overlap_with_ddp": lambda: (_zero(),),
    "_cached_global_plan": lambda: (_planner(),),
    "_cached_plans_key": lambda: (_planner(),),
    "_get_fsdp_state": lambda: (_fsdp(),),
    "_fsdp_param_group": lambda: (_fsdp()._get_fsdp_state(),),
    "_fsdp_param_groups": lambda: (_fsdp()._get_fsdp_state(),),
    "_all_reduce_hook": lambda: (_fsdp()._get_fsdp_state()._fsdp_param_group,),
    "_clear_sharding_prop_cache": lambda: (importlib.import_module("torch.distributed.tensor.debug"),),
    "_op_dispatcher": lambda: (importlib.import_module("torch.distributed.tensor").DTensor,),
    "_AutoDispatchBelowAutograd": lambda: (torch._C,),
    "_foreach_": lambda: (),  # how names begin, of which some are above
}

# What a newer torch alone has -> what stands for it in an older one.
INSTEAD = {"_fsdp_param_groups": "_fsdp_param_group", "_clear_sharding_prop_cache": "_op_dispatcher"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private_path(name: str) -> bool:
    return any(map(_is_private, name.split(".")))


def imported(path: Path) -> set[str]:
    """What a file imports from torch's private modules, or by a private name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.startswith("torch.") and _is_private_path(name)}


def attributes(path: Path) -> set[str]:
    """Private attributes that a file reads of anything but itself."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and _is_private(node.attr)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


def strings(path: Path) -> set[str]:
    """The same by a string that is one, wherever it stands."""
    constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    return {value for value in constants if isinstance(value, str) and _is_private(value)}


def asked_for(path: Path) -> set[str]:
    """Strings that a file gives to getattr, hasattr or attrgetter."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    given = [
        argument
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("getattr", "hasattr", "attrgetter")
        for argument in call.args
    ]
    return {
        argument.value for argument in given if isinstance(argument, ast.Constant) if isinstance(argument.value, str)
    }


KNOWN = set().union(*(attributes(path) | strings(path) for path in INTERNALS))


@pytest.mark.parametrize("name", sorted(set().union(*map(imported, INTERNALS))))
def test_this_torch_has_each_name(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    what = f"torch {torch.__version__} has no {name}: find what took its place, and change checkflow/torch_*.py"
    try:
        holder = importlib.import_module(module)
    except ImportError as error:
        pytest.fail(f"{what} ({error})")
    assert hasattr(holder, attribute), what


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_this_torch_has_each_attribute(name: str) -> None:
    assert name in SAMPLES, f"{name}: give an object of torch that has it"
    older = INSTEAD.get(name)
    if older is not None and not all(hasattr(sample, name) for sample in SAMPLES[name]()):
        name = older
    for sample in SAMPLES[name]():
        what = f"torch {torch.__version__}: {type(sample).__name__} has no {name}"
        assert hasattr(sample, name), f"{what}: find what took its place, and change checkflow/torch_*.py"


def test_no_other_file_names_one() -> None:
    """Neither an import, nor `torch._x`, nor an attribute that these two have a function for."""
    known = KNOWN - {"_foreach_"}
    wrong = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path not in INTERNALS:
            tree = ast.parse(path.read_text())
            chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            reached = {chain for chain in chains if re.fullmatch(r"torch(\.\w+)+", chain) and _is_private_path(chain)}
            if found := imported(path) | reached | ((attributes(path) | asked_for(path)) & known):
                wrong[str(path.relative_to(PACKAGE))] = sorted(found)
    assert not wrong


def test_versions_count_writes() -> None:
    from checkflow.torch_internals import versions

    tensors = [torch.zeros(2), torch.zeros(2)]
    before = versions(tensors)
    tensors[1].add_(1)
    assert [after - earlier for after, earlier in zip(versions(tensors), before, strict=True)] == [0, 1]


def test_identities_are_of_what_objects_stand_for() -> None:
    from checkflow.torch_internals import generator_id, storage_id

    tensor, other = torch.zeros(4), torch.zeros(4)
    assert storage_id(tensor.untyped_storage()) == storage_id(tensor[2:].untyped_storage())
    assert storage_id(tensor.untyped_storage()) != storage_id(other.untyped_storage())
    assert generator_id(torch.default_generator) == generator_id(torch.default_generator)
    assert generator_id(torch.default_generator) != generator_id(torch.Generator())


def test_what_modules_keep() -> None:
    from checkflow.torch_internals import (
        MODULE_DICTS,
        is_batch_norm,
        is_persistent,
        own_buffers,
        own_parameters,
        passing_buffers,
    )  # fmt: skip

    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("passing", torch.zeros(1), persistent=False)
    outer = torch.nn.Sequential(module)
    assert list(own_parameters(module)) == ["weight", "bias"] and not own_parameters(outer)
    assert [name for name in own_buffers(module) if is_persistent(module, name)] == [
        "running_mean", "running_var", "num_batches_tracked",
    ]  # fmt: skip
    assert "passing" in own_buffers(module) and passing_buffers(module) == {"passing"}
    assert is_batch_norm(module) and is_batch_norm(torch.nn.InstanceNorm1d(2))
    assert not is_batch_norm(torch.nn.LayerNorm(2))
    assert all(name in vars(module) for name in MODULE_DICTS)


def test_what_torch_compile_wraps_and_tells() -> None:
    from checkflow.torch_internals import Compilations, compiled_from

    module = torch.nn.ReLU()
    compiled = torch.compile(module, backend="eager")
    assert isinstance(compiled, torch.nn.Module) and compiled_from(compiled) is module
    assert compiled_from(module) is None
    told: list[object] = []
    compilations = Compilations()
    compilations.watch(told.append)
    try:
        torch.compile(module, backend="eager")(torch.ones(3))
        assert told and compilations.happened
    finally:
        compilations.unwatch(told.append)
        compilations.unwatch(told.append)
    before = len(told)
    torch.compile(torch.nn.GELU(), backend="eager")(torch.ones(3))
    assert len(told) == before


def test_hooks_of_optimizers() -> None:
    from checkflow.torch_internals import runs_step_hooks, step_pre_hooks, takes_load_hooks

    class Wrapper(torch.optim.Optimizer):
        def __init__(self) -> None:  # as some wrappers: without Optimizer's
            pass

    optimizer = _optimizer()
    assert runs_step_hooks(optimizer) and takes_load_hooks(optimizer)
    assert not runs_step_hooks(Wrapper()) and not takes_load_hooks(Wrapper())
    wrapper = Wrapper()
    for kind in (dict, OrderedDict):
        for when in ("pre", "post"):
            vars(wrapper)[f"_optimizer_step_{when}_hooks"] = kind()
            vars(wrapper)[f"_optimizer_load_state_dict_{when}_hooks"] = kind()
        wrapper.param_groups, wrapper.defaults = [], {}
        assert takes_load_hooks(wrapper) is (kind is OrderedDict)
        assert not runs_step_hooks(wrapper)
        wrapper.zero_grad()  # its class's step() runs hooks from now on
        assert not runs_step_hooks(wrapper)
    order: list[int] = []
    for number in (1, 2):
        last = optimizer.register_step_pre_hook(lambda *_, number=number: order.append(number))
    step_pre_hooks(optimizer).move_to_end(last.id, last=False)
    optimizer.step()
    assert order == [2, 1]


def test_what_a_scaler_updates() -> None:
    from checkflow.torch_internals import scaler_tensors

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert scaler_tensors(scaler) == (None, None)
    scaler.scale(torch.ones(1))
    scale, tracker = scaler_tensors(scaler)
    assert scale is not None and scale.item() == 8.0
    assert tracker is not None and tracker.item() == 0


def test_where_passes_over_loaders_are() -> None:
    from checkflow.torch_internals import given_by, passes_over

    data = torch.utils.data.TensorDataset(torch.zeros(3))
    one, other = (torch.utils.data.DataLoader(data) for _ in range(2))
    first, second, others = iter(one), iter(one), iter(other)
    assert len([next(first), next(first), next(others)]) == 3
    found = {id(run): (loader, given_by(run)) for loader, run in passes_over([one])}
    assert found == {id(first): (one, 2), id(second): (one, 0)}
    assert [loader for loader, _ in passes_over([other])] == [other]


def test_operators() -> None:
    from checkflow.torch_internals import can_decompose, foreach_copy, foreach_functions, schema_of

    assert schema_of(torch.ops.aten.add_.Tensor).name == "aten::add_"
    assert can_decompose(torch.ops.aten.matmul.default) and not can_decompose(torch.ops.aten.mm.default)
    assert {"_foreach_add_", "_foreach_lerp_", "_foreach_copy_", "_foreach_sqrt"} <= set(foreach_functions())
    targets = [torch.zeros(2), torch.zeros(3)]
    foreach_copy(targets, [torch.ones(2), torch.ones(3)], non_blocking=False)
    assert all(bool((target == 1).all()) for target in targets)


def test_modes_and_autograd_are_left_out() -> None:
    from checkflow.torch_internals import FakeTensor, FakeTensorMode, below_autograd, without_modes

    with FakeTensorMode():
        assert isinstance(torch.zeros(2), FakeTensor)
        with without_modes():
            assert not isinstance(torch.zeros(2), FakeTensor)
        assert isinstance(torch.zeros(2), FakeTensor)
    leaf = torch.ones(2, requires_grad=True)
    with below_autograd():
        assert not (leaf * 2).requires_grad
    assert (leaf * 2).requires_grad


def test_foreach_takes_a_type_for_a_while() -> None:
    from torch.utils._foreach_utils import _has_foreach_support

    from checkflow.torch_internals import foreach_takes

    class Own(torch.Tensor):
        pass

    given: list[torch.Tensor] = [torch.ones(2).as_subclass(Own)]
    device = torch.device("cpu")
    assert not _has_foreach_support(given, device)
    with foreach_takes(Own):
        assert _has_foreach_support(given, device)
    assert not _has_foreach_support(given, device)


def test_failures_on_fake_tensors_are_logged_where_it_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    import torch._subclasses.fake_tensor as module

    from checkflow.torch_internals import fake_tensor_log

    assert module.log is fake_tensor_log()
    assert not caplog.records


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_of_a_layer_is_found(shape: tuple[int, ...], bias: bool) -> None:
    """As it is given what came back, in rows, whether or not its output is written into."""
    from checkflow.torch_internals import multiplied_by

    layer = torch.nn.Linear(3, 4, bias=bias)
    output = layer(torch.ones(shape))
    found = multiplied_by(layer.weight, output)
    assert found is not None and multiplied_by(torch.zeros(4, 3), output) is None
    node, number = found
    products: list[int] = []
    node.register_hook(lambda made, _: products.append(made[number].data_ptr()))
    layer.weight.register_hook(lambda gradient: products.append(gradient.data_ptr()))  # type: ignore[no-untyped-call]
    assert multiplied_by(layer.weight, output * 2) is None and multiplied_by(layer.weight, output.detach()) is None
    came_back: list[tuple[int, ...]] = []
    node.register_prehook(lambda gradients: came_back.append(tuple(gradients[0].shape)))
    torch.autograd.backward(output.relu_().sum())
    assert came_back == [(torch.Size(shape).numel() // 3, 4)]
    assert products[0] == products[1]


def test_who_is_given_a_gradient_is_counted() -> None:
    from checkflow.torch_internals import others_hooks
    from checkflow.trace.hooks import mark_gradient

    weight = torch.nn.Parameter(torch.zeros(2))
    assert others_hooks(weight) == 0
    handle = weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    weight.register_hook(partial(lambda gradient: gradient))  # type: ignore[no-untyped-call]
    weight.register_hook(mark_gradient)  # type: ignore[no-untyped-call]
    assert others_hooks(weight) == 2
    handle.remove()
    assert others_hooks(weight) == 1
