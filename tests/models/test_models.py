"""The bundled networks: their parameters, names and inputs, and that each trains."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from checkflow.errors import InputError
from checkflow.jsonfile import digest_of
from checkflow.models import NAMES, factory
from checkflow.models._optimizers import OPTIMIZERS, make_optimizers


@dataclass(frozen=True, slots=True)
class Known:
    """What the reference implementation says of a network."""

    parameters: int
    rounded: str  # as published, in millions
    inputs: tuple[tuple[int, ...], ...]  # at batch size 2
    entries: int
    digest: str  # of the reference's sorted (name, shape) list
    some: dict[str, tuple[int, ...]]


IMAGES = ((2, 3, 224, 224),)
KNOWN = {
    "alexnet": Known(
        61_100_840,
        "61.10",
        IMAGES,
        16,
        "bb1d9a9f5b1432a1",
        {"features.0.weight": (64, 3, 11, 11), "features.10.bias": (256,), "classifier.6.weight": (1000, 4096)},
    ),
    "bert": Known(
        124_054_272,
        "124.05",
        ((2, 256),),
        197,
        "ad6af1cab77585f4",
        {
            "embeddings.word_embeddings.weight": (50265, 768),
            "embeddings.token_type_embeddings.weight": (1, 768),
            "encoder.layer.11.attention.self.query.weight": (768, 768),
            "encoder.layer.0.attention.output.LayerNorm.bias": (768,),
            "encoder.layer.0.intermediate.dense.weight": (3072, 768),
        },
    ),
    "gpt2": Known(
        124_439_808,
        "124.44",
        ((2, 1024),),
        149,
        "a3e1b01a9b59b04c",
        {"transformer.h.0.attn.c_attn.weight": (768, 2304), "lm_head.weight": (50257, 768)},
    ),
    "llama_1b": Known(
        1_235_814_400,
        "1235.81",
        ((2, 2048),),
        147,
        "970e7594e6013d64",
        {"model.layers.15.self_attn.k_proj.weight": (512, 2048), "lm_head.weight": (128256, 2048)},
    ),
    "llama_70b": Known(
        70_553_706_496,
        "70553.71",
        ((2, 2048),),
        723,
        "f9bc014f2491b7f0",
        {"model.layers.79.self_attn.v_proj.weight": (1024, 8192), "lm_head.weight": (128256, 8192)},
    ),
    "llama_8b": Known(
        8_030_261_248,
        "8030.26",
        ((2, 2048),),
        291,
        "0a8f1037116e89c5",
        {"model.layers.31.mlp.down_proj.weight": (4096, 14336), "model.norm.weight": (4096,)},
    ),
    "mnasnet": Known(
        2_218_512,
        "2.22",
        IMAGES,
        314,
        "b4399903a6fe0755",
        {"layers.0.weight": (16, 3, 3, 3), "layers.8.0.layers.3.weight": (24, 1, 3, 3), "layers.1.running_var": (16,)},
    ),
    "resnet": Known(
        11_689_512,
        "11.69",
        IMAGES,
        122,
        "57dd06b2996bc1c8",
        {"conv1.weight": (64, 3, 7, 7), "layer2.0.downsample.0.weight": (128, 64, 1, 1), "bn1.num_batches_tracked": ()},
    ),
    "resnet3d": Known(
        33_371_472,
        "33.37",
        ((2, 3, 1, 112, 112),),
        122,
        "477b6498d091e3ac",
        {"stem.0.weight": (64, 3, 3, 7, 7), "layer1.0.conv1.0.weight": (64, 64, 3, 3, 3), "fc.weight": (400, 512)},
    ),
    "transformer": Known(
        7_358_464,
        "7.358",
        ((10, 2, 512), (20, 2, 512)),
        34,
        "83e0b4fb36f0686b",
        {"decoder.layers.0.multihead_attn.in_proj_weight": (1536, 512), "encoder.norm.weight": (512,)},
    ),
    "vgg": Known(
        132_863_336,
        "132.86",
        IMAGES,
        22,
        "f9a15256bb2b0e62",
        {"features.18.weight": (512, 512, 3, 3), "classifier.0.weight": (4096, 25088)},
    ),
    "vit": Known(
        86_567_656,
        "86.57",
        IMAGES,
        152,
        "25e17e934bbb5c15",
        {
            "class_token": (1, 1, 768),
            "encoder.pos_embedding": (1, 197, 768),
            "encoder.layers.encoder_layer_0.mlp.3.weight": (768, 3072),
            "heads.head.weight": (1000, 768),
        },
    ),
}


def only_model(name: str, batch_size: int, *, small: bool = False) -> nn.Module:
    (model,) = factory(name)(batch_size=batch_size, small=small).models
    return model


def test_every_file_is_a_known_model() -> None:
    """The registry is the folder, sorted, without the shared parts."""
    assert tuple(KNOWN) == NAMES


def test_an_unknown_name_is_an_input_error() -> None:
    """The message names the choices."""
    with pytest.raises(InputError, match=r"'_recipe' is not bundled; choose one of alexnet, bert"):
        factory("_recipe")


def test_the_registry_loads_no_network() -> None:
    """Importing checkflow.models imports none of the files it lists."""
    script = "import sys, checkflow.models; sys.exit(any(m.startswith('checkflow.models.') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_names_are_the_references(name: str) -> None:
    """Parameter count, and each name and shape of the state_dict, equal the reference implementation's."""
    known = KNOWN[name]
    with FakeTensorMode():
        model = only_model(name, 1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    state = model.state_dict()
    assert parameters == known.parameters
    decimals = len(known.rounded.partition(".")[2])
    assert f"{parameters / 1e6:.{decimals}f}" == known.rounded
    assert {key: tuple(state[key].shape) for key in known.some} == known.some
    assert len(state) == known.entries
    listing = sorted([key, list(value.shape)] for key, value in state.items())
    assert digest_of(listing).startswith(f"sha256:{known.digest}")


@pytest.mark.parametrize("name", NAMES)
def test_full_networks_run_under_fake_tensors(name: str) -> None:
    """Two iterations need no data, and the inputs are those of the evaluation."""
    with FakeTensorMode():
        training = factory(name)(batch_size=2)
        seen: list[tuple[Tensor, ...]] = []
        training.models[0].register_forward_pre_hook(lambda _module, inputs: seen.append(inputs))
        training.iteration()
        training.iteration()
    assert [tuple(tuple(x.shape) for x in inputs) for inputs in seen] == [KNOWN[name].inputs] * 2
    assert training.models[0].training
    assert all(parameter.grad is None for parameter in training.models[0].parameters())


@pytest.mark.parametrize("name", NAMES)
def test_networks_follow_the_default_device(name: str) -> None:
    """Built under another default device, the whole iteration stays there."""
    with torch.device("meta"):
        training = factory(name)(batch_size=1, optimizer="adamw", small=True)
    training.iteration()
    assert {tensor.device.type for tensor in training.models[0].state_dict().values()} == {"meta"}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", NAMES)
def test_small_networks_train(name: str, optimizer: str) -> None:
    """Two real iterations change every state tensor but the one that is constant, to finite values."""
    torch.manual_seed(0)
    training = factory(name)(batch_size=2, optimizer=optimizer, small=True)
    (model,) = training.models
    before = {key: value.clone() for key, value in model.state_dict().items()}
    training.iteration()
    training.iteration()
    after = model.state_dict()
    unchanged = {key for key in after if torch.equal(before[key], after[key])}
    assert unchanged == ({"embeddings.token_type_embeddings.weight"} if name == "bert" else set())
    assert all(value.isfinite().all() for value in after.values())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["alexnet", "bert"])
def test_small_networks_train_under_fake_tensors(name: str, optimizer: str) -> None:
    """Every optimizer runs without data, its state made in the first iteration and used in the second."""
    with FakeTensorMode():
        training = factory(name)(batch_size=2, optimizer=optimizer, small=True)
        training.iteration()
        training.iteration()
    assert optimizer == "sgd" or any(each.state for each in training.optimizers)


@pytest.mark.parametrize("name", NAMES)
def test_small_networks_have_the_same_kinds_of_layers(name: str) -> None:
    """The small form has every type of module that the full one has."""
    with FakeTensorMode():
        full, small = only_model(name, 1), only_model(name, 1, small=True)
    assert {type(module) for module in full.modules()} == {type(module) for module in small.modules()}


def test_full_networks_have_the_evaluations_loss() -> None:
    """A target of zeros gives gradients of zero: SGD changes running statistics and no parameter."""
    torch.manual_seed(0)
    training = factory("mnasnet")(batch_size=2)
    (model,) = training.models
    before = {key: value.clone() for key, value in model.state_dict().items()}
    training.iteration()
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {key for key, _ in model.named_buffers()}


def test_mnasnet_keeps_its_slow_statistics() -> None:
    """Every BatchNorm has the reference's momentum."""
    momenta = {m.momentum for m in only_model("mnasnet", 1).modules() if isinstance(m, nn.BatchNorm2d)}
    assert momenta == {1 - 0.9997}


def test_transformer_is_torchs() -> None:
    """The same weights give the same output as nn.Transformer's."""
    torch.manual_seed(0)
    ours = only_model("transformer", 2, small=True).eval()
    with pytest.warns(UserWarning, match="enable_nested_tensor"):
        theirs = nn.Transformer(32, 1, 1, 1, dim_feedforward=128).eval()
    assert list(theirs.state_dict()) == list(ours.state_dict())
    theirs.load_state_dict(ours.state_dict())
    source, target = torch.randn(10, 2, 32), torch.randn(20, 2, 32)
    torch.testing.assert_close(ours(source, target), theirs(source, target))


def test_vit_loads_the_names_of_published_weights() -> None:
    """Weights saved with `linear_1` and `linear_2` in the MLPs load strictly."""
    model = only_model("vit", 1, small=True)
    published = {
        key.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): torch.full_like(value, 0.5)
        for key, value in model.state_dict().items()
    }
    model.load_state_dict(published)
    assert all((value == 0.5).all() for value in model.state_dict().values())


@pytest.mark.parametrize("name", ["gpt2", "llama_1b"])
def test_tied_weights_are_one_storage(name: str) -> None:
    """The output layer and the embedding share their bytes."""
    state = only_model(name, 1, small=True).state_dict()
    embedding = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    assert state["lm_head.weight"].data_ptr() == state[embedding].data_ptr()


@pytest.mark.parametrize("name", ["gpt2", "llama_1b", "llama_8b"])
def test_language_models_look_back_only(name: str) -> None:
    """A token's logits do not depend on later tokens."""
    torch.manual_seed(0)
    model = only_model(name, 1, small=True).eval()
    tokens = torch.randint(100, (1, 12))
    other = torch.cat((tokens[:, :8], tokens[:, 8:] + 1), dim=1) % 100
    torch.testing.assert_close(model(tokens)[:, :8], model(other)[:, :8])
    assert not torch.allclose(model(tokens)[:, 8:], model(other)[:, 8:])


def test_llama_stretches_long_wavelengths_only() -> None:
    """The fastest frequencies are the plain ones, the slowest are divided by the factor."""
    from checkflow.models import _llama, llama_8b

    plain = 500000.0 ** (-torch.arange(0, 128, 2) / 128)
    ratio = plain / _llama.rotary_frequencies(llama_8b.FULL)
    torch.testing.assert_close(ratio[:29], torch.ones(29))  # wavelengths up to 8192 / 4
    torch.testing.assert_close(ratio[35:], torch.full((29,), 8.0))  # wavelengths of 8192 and more
    assert ((ratio[29:35] > 1) & (ratio[29:35] < 8)).all()


def test_muon_takes_hidden_weights_and_adamw_the_rest() -> None:
    """Between them they have each parameter once; embeddings and the output layer are AdamW's."""
    training = factory("llama_8b")(optimizer="muon", small=True)
    muon, adamw = ({id(p) for group in each.param_groups for p in group["params"]} for each in training.optimizers)
    named = {name: id(parameter) for name, parameter in training.models[0].named_parameters()}
    assert muon | adamw == set(named.values()) and not muon & adamw
    assert {name for name, key in named.items() if key in muon} == {name for name in named if "proj" in name}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_annotated_and_have_defaults(name: str) -> None:
    """A command line can set each by name; the batch size is 32 for the networks of the evaluation."""
    parameters = inspect.signature(factory(name), eval_str=True).parameters
    assert {"batch_size", "optimizer", "small"} <= set(parameters)
    assert all(p.annotation in (int, str, bool) and type(p.default) is p.annotation for p in parameters.values())
    assert parameters["batch_size"].default == {"gpt2": 8, "llama_1b": 1, "llama_70b": 1, "llama_8b": 1}.get(name, 32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "lion"}, "optimizer: 'lion' is not known; choose one of sgd, momentum, adam"),
        ({"batch_size": 0}, "batch_size: 0 is not positive"),
    ],
)
def test_wrong_arguments_are_input_errors(name: str, arguments: dict[str, int | str], message: str) -> None:
    """Each message names the argument and what to give."""
    with pytest.raises(InputError, match=message):
        factory(name)(small=True, **arguments)


@pytest.mark.parametrize(("name", "limit"), [("bert", 512), ("gpt2", 1024), ("llama_8b", 131072)])
def test_sequences_are_bounded_by_the_models_positions(name: str, limit: int) -> None:
    """The longest sequence runs, one more is refused."""
    with FakeTensorMode():
        factory(name)(batch_size=1, sequence_length=limit).iteration()
        with pytest.raises(InputError, match=f"sequence_length: {limit + 1} is more than the model's {limit}"):
            factory(name)(batch_size=1, sequence_length=limit + 1)


def test_optimizer_names_mean_what_they_say() -> None:
    """The forms of AdamW differ in the flag that picks them."""
    model = nn.Linear(2, 2)
    flags = {
        name: (defaults["foreach"], defaults["fused"])
        for name in OPTIMIZERS
        if name.startswith("adamw")
        for defaults in [make_optimizers(name, model)[0].defaults]
    }
    assert flags == {
        "adamw": (None, None),
        "adamw_looped": (False, None),
        "adamw_foreach": (True, None),
        "adamw_fused": (None, True),
    }
