"""transformers: language, image and speech models from their configurations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

import checkflow
from third_parties.case import Case, named, trained

Batch = Callable[[], dict[str, Tensor]]
TEXT = {
    "vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = TEXT | {"num_key_value_heads": 2, "head_dim": 8}
IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 10}
VIT = IMAGE | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def words() -> dict[str, Tensor]:
    ids = torch.randint(3, 128, (2, 16))
    return {"input_ids": ids, "labels": ids.clone()}


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(10, (2,))}


def speech() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 4000), "labels": torch.randint(3, 30, (2, 4))}


def spectra() -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 64), "labels": torch.randint(3, 128, (2, 6))}


def pairs() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 98, (2, 8)), "pixel_values": torch.randn(2, 3, 32, 32)}


def build(kind: type[hf.PreTrainedModel], settings: dict[str, object], batch: Batch) -> checkflow.Training:
    torch.manual_seed(0)
    made: nn.Module = kind(kind.config_class(**settings))
    made.train()
    extra = {"return_loss": True} if batch is pairs else {}

    def loss() -> Tensor:
        answer: Tensor = made(**batch(), **extra).loss
        return answer

    return trained(made, loss)


CASES: tuple[Case, ...] = named(
    build,
    gpt2=(hf.GPT2LMHeadModel, TEXT, words),
    llama=(hf.LlamaForCausalLM, GROUPED, words),
    mistral=(hf.MistralForCausalLM, GROUPED, words),
    qwen2=(hf.Qwen2ForCausalLM, TEXT | {"num_key_value_heads": 2}, words),
    qwen3=(hf.Qwen3ForCausalLM, GROUPED, words),
    gemma=(hf.GemmaForCausalLM, GROUPED, words),
    gemma2=(hf.Gemma2ForCausalLM, GROUPED, words),
    phi=(hf.PhiForCausalLM, TEXT, words),
    gpt_neox=(hf.GPTNeoXForCausalLM, TEXT, words),
    opt=(hf.OPTForCausalLM, TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 32}, words),
    bloom=(hf.BloomForCausalLM, TEXT, words),
    falcon=(hf.FalconForCausalLM, TEXT, words),
    mamba=(hf.MambaForCausalLM, {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, words),
    mixtral=(hf.MixtralForCausalLM, GROUPED | {"num_local_experts": 4}, words),
    bert=(hf.BertForMaskedLM, TEXT, words),
    roberta=(hf.RobertaForMaskedLM, TEXT, words),
    distilbert=(hf.DistilBertForMaskedLM, {"vocab_size": 128, "dim": 32, "n_layers": 2, "n_heads": 4}, words),
    albert=(hf.AlbertForMaskedLM, TEXT | {"embedding_size": 16}, words),
    electra=(hf.ElectraForMaskedLM, TEXT | {"embedding_size": 16}, words),
    deberta=(hf.DebertaV2ForMaskedLM, TEXT, words),
    t5=(hf.T5ForConditionalGeneration, {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
        "num_heads": 4, "decoder_start_token_id": 0}, words),
    bart=(hf.BartForConditionalGeneration, {"vocab_size": 128, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_position_embeddings": 64}, words),
    vit=(hf.ViTForImageClassification, VIT, images),
    deit=(hf.DeiTForImageClassification, VIT, images),
    beit=(hf.BeitForImageClassification, VIT, images),
    swin=(hf.SwinForImageClassification, {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1],
        "num_heads": [2, 4], "window_size": 4, "num_labels": 10}, images),
    convnext=(hf.ConvNextForImageClassification, {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
        "num_labels": 10}, images),
    resnet=(hf.ResNetForImageClassification, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1],
        "layer_type": "basic", "num_labels": 10}, images),
    clip=(hf.CLIPModel, {"text_config": TEXT | {"vocab_size": 99, "eos_token_id": 98},
        "vision_config": VIT, "projection_dim": 16}, pairs),
    wav2vec2=(hf.Wav2Vec2ForCTC, {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8],
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "pad_token_id": 0}, speech),
    whisper=(hf.WhisperForConditionalGeneration, {"vocab_size": 128, "num_mel_bins": 8, "d_model": 32,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 32, "max_target_positions": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}, spectra),
)  # fmt: skip
