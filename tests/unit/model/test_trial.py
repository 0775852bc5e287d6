"""Models that cannot be trained, or not in packs, are refused in one message, most of them before their weights load."""

import contextlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import CAUSAL, DECODERS, make_model, tiny_config
from models import embedded_model, model_folder, random_preference
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.schema import Config
from tandem.config.sections.policy import Packing, Policy
from tandem.errors import ConfigError, TandemError
from tandem.model import architecture
from tandem.model.architecture import auto_class, check_architecture, check_packable
from tandem.model.attention.pack_attention import attend
from tandem.model.distributed.layers import check_layers
from tandem.model.files.source import ModelSource, find_model
from tandem.model.load import load_policy
from tandem.model.text_models import TEXT_MODELS
from tandem.packing.layout import lay_out
from tandem.training.start.setup import set_up

CPU = torch.device("cpu")
MODES = ["batch", "none"]


def policy(model="it", *, mode="batch", **settings):
    return Policy(model_name=str(model), packing=Packing(mode=mode), max_total_sequence_length=256, **settings)


def made(folder, model_type, **changes):
    """A tiny model of a type, with some settings changed."""
    folder.mkdir()
    make_model(folder, model_type)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def loaded(folder, mode):
    given = policy(folder, mode=mode)
    source = find_model(given)
    check_packable(source, given)
    return load_policy(source, given, CPU)


def refusal(call, *given, **named):
    with pytest.raises(ConfigError) as refused:
        call(*given, **named)
    return str(refused.value)


def source_of(model_type, **changes):
    return ModelSource("it", None, AutoConfig.for_model(model_type, **changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", ["t5", "musicgen", "blt"])
def test_a_model_that_is_not_causal_is_refused_before_weights_load(model_type, mode):
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}
    changes = {name: {"model_type": part} for name, part in parts.items()} if model_type == "musicgen" else {}
    assert refusal(check_packable, source_of(model_type, **changes), policy(mode=mode)) == (
        f"policy.model_name = it: model type {model_type!r} is not a causal language model in transformers. Choose a model that "
        "generates text."
    )


def test_a_multimodal_checkpoint_of_an_unknown_type_is_refused_before_weights_load():
    for name in ("blip", "voxtral"):  # of images, and of speech
        assert refusal(check_packable, source_of(name), policy(mode="batch")) == (
            f"policy.model_name = it: model type '{name}' is multimodal, and tandem does not know where its text model is, to "
            "train it and export the rest unchanged. Save its text model as a causal language model and train that, or choose a "
            "checkpoint of a type that docs/multimodal.md lists."
        )


def test_a_multimodal_checkpoint_with_prefix_attention_is_refused_for_that_reason():
    """Its text model, saved as a causal language model, would attend differently."""
    assert refusal(check_packable, source_of("paligemma"), policy(mode="none")) == (
        "policy.model_name = it: model type 'paligemma' attends to prompts in both directions, which tandem does not compute. "
        "Choose a checkpoint of a type that docs/multimodal.md lists."
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", DECODERS)
def test_an_encoder_is_refused_before_weights_load(model_type, mode):
    assert refusal(check_packable, source_of(model_type), policy(mode=mode)) == (
        f"policy.model_name = it: a {model_type} model whose configuration has is_decoder=false is an encoder, in which tokens "
        "see later ones, so it is not a causal language model. Choose a model that generates text."
    )
    check_packable(source_of(model_type, is_decoder=True), policy(mode="none"))


def test_no_other_causal_type_is_refused_as_an_encoder():
    """Some have is_decoder=false by default, and are causal: bart, gpt_neox and others."""
    refused = []
    for name in sorted(CAUSAL - {*DECODERS}):
        with contextlib.suppress(Exception):  # types that no configuration can be made for without further settings
            source = source_of(name)
            try:
                check_architecture(source)
            except ConfigError as error:
                refused += [name] if "encoder" in str(error) else []
    assert not refused


def test_the_page_lists_the_multimodal_types():
    page = (Path(__file__).parents[3] / "docs" / "multimodal.md").read_text(encoding="utf-8")
    rows = [line for line in page.split("## Supported types")[1].splitlines() if line.startswith("| ")]
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(TEXT_MODELS)


def test_weights_next_to_a_text_model_are_removed_with_the_other_parts():
    """LLaVA-NeXT has a weight of its own in the module that contains the text model. It would be trained."""
    config = tiny_config("llava_next")
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    assert [name for name, _ in model.named_parameters() if "language_model" not in name] == ["lm_head.weight"]


def test_a_multimodal_checkpoint_with_quantised_weights_is_refused_before_weights_load():
    source = source_of("mistral3", quantization_config={"quant_method": "fp8"})
    assert refusal(check_packable, source, policy(mode="batch")) == (
        "policy.model_name = it: a multimodal checkpoint with quantised weights, whose text model cannot be exported again with "
        "its other parts. Give the checkpoint that it was quantised from."
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_sees_later_tokens_is_refused(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(architecture, "ENCODERS", ())  # as if it were a type that is not known to be an encoder
    folder = made(tmp_path / "model", "bert")
    message = refusal(loaded, folder, mode)
    assert message.startswith(
        f"policy.model_name = {folder}: not a causal language model: a later token changes the log-probabilities of earlier ones "
        "by 0."
    )
    assert message.endswith("nats. Choose a model that generates text.")


@pytest.mark.parametrize(
    ("model_type", "model_class"),
    [("falcon", "FalconForCausalLM"), ("gptj", "GPTJForCausalLM"), ("gpt_neo", "GPTNeoForCausalLM")],
)
def test_a_model_with_fixed_attention_is_refused_packed_and_exact_unpacked(tmp_path, model_type, model_class):
    folder = made(tmp_path / "model", model_type)
    assert refusal(loaded, folder, "batch") == (
        f"policy.model_name = {folder}: the attention of {model_class} in transformers cannot be replaced, so packed sequences "
        "would attend to each other. Train it unpacked: policy.packing.mode=none."
    )
    assert difference_to_plain(loaded(folder, "none")) < 2e-6


@pytest.mark.parametrize("model_type", ["stablelm", "nemotron"])
def test_a_model_that_does_not_pass_the_mask_on_is_refused_packed_and_exact_unpacked(tmp_path, model_type):
    folder = made(tmp_path / "model", model_type)
    assert refusal(loaded, folder, "batch") == (
        f"policy.model_name = {folder}: this model's layers do not pass the pack's mask on to attention. Train it with "
        "policy.packing.mode=none."
    )
    assert difference_to_plain(loaded(folder, "none")) < 2e-6


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model_type", ["llama4_text", "phimoe"])
def test_models_with_special_attention_or_routers_are_exact_packed_and_unpacked(tmp_path, model_type, mode):
    assert difference_to_plain(loaded(made(tmp_path / "model", model_type), mode)) < 2e-6


def test_the_trial_passes_with_every_kind_of_attention(tmp_path):
    folder = made(tmp_path / "model", "llama")
    for attention, share_prompts in (("varlen", False), ("sdpa", True)):
        packing = Packing(share_prompts=share_prompts)
        given = Policy(model_name=str(folder), attention=attention, packing=packing)
        load_policy(find_model(given), given, CPU)


def test_a_model_without_sdpa_is_loaded_unpacked_with_eager_attention(tmp_path):
    policy = loaded(made(tmp_path / "model", "gpt_oss"), "none")
    assert policy.model.config._attn_implementation == "eager"


def test_experts_are_never_sampled_and_the_published_jitter_is_kept(tmp_path):
    """PhiMoE's router uses its jitter as a margin in evaluation too, and samples experts only in training mode."""
    folder = made(tmp_path / "model", "phimoe", router_jitter_noise=0.3)
    policy = loaded(folder, "batch")
    assert not policy.model.training
    assert policy.model.config.router_jitter_noise == 0.3
    published = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        want = published(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, 9:-1].gather(-1, ids[0, 10:, None])
    torch.testing.assert_close(policy.plain_logps(ids[0, :10], ids[0, 10:]), want[:, 0], atol=2e-5, rtol=0)


def test_attention_chunks_shorter_than_the_sequences_are_refused_packed():
    source = source_of("llama4_text", attention_chunk_size=128)
    assert refusal(check_packable, source, policy()) == (
        "policy.model_name = it: its attention works in chunks of 128 tokens, which packing does not support. Set "
        "policy.max_total_sequence_length=128 or less, or policy.packing.mode=none."
    )
    check_packable(source, policy(mode="none"))
    check_packable(source_of("llama4_text", attention_chunk_size=256), policy())


def test_sparse_attention_is_refused_packed():
    assert refusal(check_packable, source_of("deepseek_v32"), policy()) == (
        "policy.model_name = it: its attention selects the tokens that it attends to (index_topk), which packing does not "
        "support. Train it unpacked: policy.packing.mode=none."
    )


def test_a_window_that_only_the_models_mask_has_is_refused_for_longer_sequences(tmp_path):
    folder = made(tmp_path / "model", "phimoe", sliding_window=100)
    assert refusal(loaded, folder, "batch") == (
        f"policy.model_name = {folder}: only 0 of 4 layers pass their window of 100 tokens to attention, so in a pack the others "
        "would see further back. Set policy.max_total_sequence_length=100 or less, or policy.packing.mode=none."
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "sliding_window": 256}))
    loaded(folder, "batch")


def test_a_model_that_transformers_cannot_build_is_refused(tmp_path):
    folder = made(tmp_path / "model", "diffllama", attention_dropout=0.1)
    given = policy(folder, activation_checkpointing="full")
    assert refusal(check_layers, find_model(given), given, 1) == (
        f"policy.model_name = {folder}: transformers cannot build a diffllama model from this configuration (ValueError: "
        "DiffLlama does not support `attention_dropout > 0`: the differential attention mechanism has no paper-defined dropout "
        "semantics). Choose another model."
    )


def test_weights_of_the_wrong_shape_are_refused(tmp_path):
    folder = made(tmp_path / "model", "llama", intermediate_size=40)
    message = refusal(loaded, folder, "none")
    assert message.startswith(f"policy.model_name = {folder}: transformers cannot load it (RuntimeError: ")
    assert message.endswith("Choose another model, or download it again.")


def test_an_unexpected_error_in_a_model_becomes_one_message(tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaModel

    def failing(*given, **named):
        raise KeyError("nothing")

    folder = made(tmp_path / "model", "llama")
    monkeypatch.setattr(LlamaModel, "forward", failing)
    message = refusal(loaded, folder, "batch")
    assert message.startswith(
        f"policy.model_name = {folder}: running a few tokens through LlamaForCausalLM of transformers 5."
    )
    assert message.endswith("failed (KeyError: 'nothing'). Try policy.packing.mode=none.")
    assert refusal(loaded, folder, "none").endswith("failed (KeyError: 'nothing'). Choose another model.")


def test_a_models_own_mask_is_refused_in_packs():
    query = torch.zeros(1, 1, 4, 8)
    with pytest.raises(TandemError) as refused:
        attend(torch.nn.Module(), query, query, query, torch.ones(4, 4), pack=object())  # type: ignore[arg-type]
    assert str(refused.value) == (
        "this model's attention uses its own mask, which packing does not support. Train it with "
        "policy.packing.mode=none."
    )


@pytest.mark.parametrize(
    ("settings", "num_ranks", "message"),
    [
        ({"activation_checkpointing": "full"}, 1, "policy.activation_checkpointing = full: {} Leave it out."),
        ({"compile": True}, 1, "policy.compile = true: {} Use policy.compile=auto."),
        ({}, 2, "2 ranks: {} Train it with one rank."),
    ],
)
def test_settings_that_need_the_list_of_layers_are_refused_for_a_model_without_one(settings, num_ranks, message):
    why = "needs a model whose layers are in a list named `layers`, which it (model type gpt2) does not have."
    source = ModelSource("it", None, tiny_config("gpt2"))  # type: ignore[arg-type]
    assert refusal(check_layers, source, policy(**settings), num_ranks) == message.format(why)


def test_a_model_without_a_list_of_layers_is_refused_before_weights_load(tmp_path):
    model = made(tmp_path / "model", "gpt2")
    template = {"chat_template": str(embedded_model() / "chat_template.jinja")}
    given = Policy(model_name=str(model), activation_checkpointing="full", tokenizer=template)
    assert refusal(set_up, Config(policy=given), CPU).startswith(
        "policy.activation_checkpointing = full: needs a model whose layers are in a list"
    )


def test_a_reference_model_without_a_list_of_layers_is_refused_too(tmp_path):
    model = model_folder(tmp_path / "reference", "gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=2048)
    given = {"policy": Policy(activation_checkpointing="full"), "reference": {"model": str(model)}}
    assert refusal(set_up, Config(**given), CPU) == (
        f"policy.activation_checkpointing = full: needs a model whose layers are in a list named `layers`, which {model} (model "
        "type gpt2) does not have. Leave it out."
    )


def test_check_layers_says_whether_a_model_has_a_list_of_layers():
    assert not check_layers(ModelSource("it", None, tiny_config("gpt2")), policy(), 1)  # type: ignore[arg-type]
    for name in ("llama4_text", "llama4", "gemma3"):
        assert check_layers(ModelSource("it", None, tiny_config(name)), policy(compile=True), 2)  # type: ignore[arg-type]


def difference_to_plain(policy):
    """Mean difference per token between rows and the plain forward, in nats."""
    rng = np.random.default_rng(0)
    preferences = [random_preference(rng, max_prompt=20, max_completion=20) for _ in range(3)]
    arrangement = "shared" if policy.packed else "separate"
    inputs = policy.inputs(lay_out(range(3), preferences, length=128, arrangement=arrangement), CPU)
    sequences = [(one.prompt, completion) for one in preferences for completion in one.completions]
    with torch.no_grad():
        got = policy(inputs)[: inputs.num_scored]
    plain = [policy.plain_logps(*(torch.from_numpy(ids.astype(np.int64)) for ids in pair)) for pair in sequences]
    return float((got - torch.cat(plain)).abs().mean())
