"""Models that are refused before their weights load, and the settings that loading changes."""

import json
import os
import shutil
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from models import MODEL, as_policy, random_preference, tiny_config
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.config.schema import Config
from tandem.config.sections.policy import Packing, Policy
from tandem.errors import ConfigError
from tandem.exporting.weights import _empty_model
from tandem.model.architecture import architecture_of, check_packable, windows_of
from tandem.model.distributed.layer_sizes import layers_of
from tandem.model.distributed.process_group import leave_process_group
from tandem.model.files.layer_values import different_settings, values_of
from tandem.model.files.source import ModelSource, find_model, find_source, find_tokenizer, weights_fingerprint
from tandem.model.files.tiny import tiny_model
from tandem.model.load import attention_kind, load_policy, smallest_head
from tandem.packing.layout import lay_out
from tandem.terminal.commands import export_call, resume_call
from tandem.training.run.lock import locked
from tandem.training.start.setup import set_up

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_model(), tmp_path / "model")


def rewrite_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def refusal(**policy):
    with pytest.raises(ConfigError) as refused:
        find_model(Policy(**policy))
    return str(refused.value)


def test_a_missing_directory_is_refused_by_name():
    assert refusal(model_name="./nowhere") == "policy.model_name = ./nowhere: no such directory. Check the path."


def test_a_directory_without_a_model_is_refused_by_name(tmp_path):
    assert refusal(model_name=str(tmp_path)) == (
        f"policy.model_name = {tmp_path}: {tmp_path} holds no config.json, so it is not a model. Give a model folder, "
        "a hub name, or a run directory."
    )


def test_the_refusal_of_a_tokenizer_given_as_a_model_names_the_tokenizer_key(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refusal(model_name=str(tmp_path)).endswith(
        f"so it is not a model. It is a tokenizer: to use it, set policy.tokenizer.name={tmp_path}."
    )


def test_an_adapter_is_not_called_a_tokenizer(tmp_path):
    # An exported adapter includes the tokenizer.
    for name in ("tokenizer.json", "adapter_config.json"):
        (tmp_path / name).write_text("{}")
    assert refusal(model_name=str(tmp_path)) == (
        f"policy.model_name = {tmp_path}: {tmp_path} holds no config.json, so it is not a model. It is an adapter: give its base "
        f"model here, and set policy.lora.adapter={tmp_path}."
    )


@pytest.fixture
def run(tmp_path):
    """A directory with the files by which a run is recognised."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("config.yaml", "rejects.jsonl", "metrics.jsonl"):
        (folder / name).touch()
    return folder


def test_the_refusal_of_a_run_given_as_a_model_names_the_runs_model(run):
    assert refusal(model_name=str(run)) == (
        f"policy.model_name = {run}: {run} is a run directory; its model will be in {run}/model once the run is finished. Finish "
        f"it: {resume_call(str(run))}"
    )
    with locked(run):
        assert refusal(model_name=str(run)).endswith(
            f" once the run is finished. It is being trained by process {os.getpid()}: wait until it is finished."
        )
    (run / "checkpoints/step_2").mkdir(parents=True)
    (run / "checkpoints/latest").symlink_to("step_2")
    assert refusal(model_name=str(run)) == (
        f"policy.model_name = {run}: {run} is a run directory; its model will be in {run}/model once the run is finished. Finish "
        f"it: {resume_call(str(run))} Or give one of its checkpoints: policy.model_name={run}/checkpoints/latest"
    )
    (run / "model").mkdir()
    assert refusal(model_name=str(run)) == (
        f"policy.model_name = {run}: {run}/model holds no config.json, so it is not a model. Give a model folder, "
        "a hub name, or a run directory."
    )
    (run / "model" / "adapter_config.json").touch()
    assert refusal(model_name=str(run)) == (
        f"policy.model_name = {run}: {run} is a run directory; its model in {run}/model is an adapter. Give the adapter's base "
        f"model here, and set policy.lora.adapter={run}/model."
    )


@pytest.mark.parametrize("key", ["policy.model_name", "reference.model"])
def test_a_finished_run_stands_for_its_model(run, key):
    shutil.copytree(MODEL, run / "model")
    source = find_source(key, str(run), None)
    assert (source.folder, source.name) == (run / "model", str(run))


def test_a_damaged_checkpoint_is_not_a_model(tmp_path):
    place = tmp_path / "step_2"
    (place / "tensors").mkdir(parents=True)
    (place / "state.json").touch()
    assert refusal(model_name=str(place)) == (
        f"policy.model_name = {place}: a damaged checkpoint: its manifest.json is missing. Give another checkpoint."
    )
    (place / "manifest.json").touch()
    assert refusal(model_name=str(place)) == (
        f"policy.model_name = {place}: a checkpoint, which has to be exported before this command can read it. Run "
        f"{export_call(str(place))}, and give the folder that it writes."
    )


@pytest.mark.parametrize("key", ["policy.tokenizer.name", "policy.lora.adapter"])
def test_the_refusal_of_a_run_given_to_another_key_names_the_runs_model(run, key):
    (run / "model").mkdir()
    overrides = [f"{key}={run}", *(["policy.lora.enabled=true"] if "lora" in key else [])]
    with pytest.raises(ConfigError) as refused:
        set_up(load_config(None, overrides).config, CPU)
    assert (
        str(refused.value)
        == f"{key} = {run}: {run} is a run directory; its model is in {run}/model. Set {key}={run}/model."
    )


def test_the_refusal_of_a_tokenizer_file_names_its_folder(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    policy = Policy(tokenizer={"name": str(file)})
    with pytest.raises(ConfigError) as refused:
        find_tokenizer(policy, find_model(policy))
    assert str(refused.value) == (
        f"policy.tokenizer.name = {file}: this is one file of a tokenizer. Give its folder: {tmp_path}."
    )


def test_a_missing_folder_without_a_reachable_hub_is_refused_in_one_sentence(monkeypatch):
    def unreachable(*_, **__):
        raise LocalEntryNotFoundError("Got: ConnectError: [Errno -2] Name or service not known\nAn error happened")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert refusal(model_name="runs/tandem-1") == (
        "policy.model_name = runs/tandem-1: there is no such folder here, the hub cannot be reached, and the cache holds no copy "
        "from an earlier download. Check the path or the name. Without a connection, give the folder of a model."
    )


def test_a_hub_name_that_does_not_exist_is_refused_in_one_line(monkeypatch):
    def refused(*_, **__):
        raise OSError("Repository Not Found\nCheck the name")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    message = refusal(model_name="someone/something")
    assert message.startswith(
        "policy.model_name = someone/something: there is no such folder here, and the hub does not provide it: "
    )
    assert "\n" not in message


def test_a_model_that_needs_its_own_code_is_refused(folder):
    rewrite_config(folder, model_type="unheard_of", auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert refusal(model_name=str(folder)) == (
        f"policy.model_name = {folder}: this model needs Python code from its own repository, which tandem does not run. "
        "Use a model type that transformers supports."
    )


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusal(model_name=str(folder)) == (
        f"policy.model_name = {folder}: {folder} holds no .safetensors weights. "
        "Pickled weights are not read; convert them with transformers' save_pretrained."
    )


def test_a_configuration_that_is_not_json_is_refused(folder):
    (folder / "config.json").write_text("{")
    assert refusal(model_name=str(folder)).startswith(f"{folder}/config.json: not readable as JSON: ")


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_position_scaling_that_depends_on_the_row_is_refused_beyond_its_limit(folder, kind):
    config = find_model(Policy(model_name=str(folder))).config
    config.rope_parameters = {"rope_type": kind, "original_max_position_embeddings": 100}
    source = ModelSource("it", folder, config)
    for packing in (Packing(), Packing(mode="none")):
        check_packable(source, Policy(max_total_sequence_length=100, packing=packing))
        with pytest.raises(ConfigError) as refused:
            check_packable(source, Policy(max_total_sequence_length=101, packing=packing))
        assert str(refused.value) == (
            f"policy.model_name = it: beyond 100 tokens its {kind} position scaling depends on the longest sequence computed at "
            "the same time, so sequences would change each other. Set policy.max_total_sequence_length=100 or less."
        )


@pytest.mark.parametrize(
    ("max_positions", "rope"),
    [
        # a separate entry for each type of layer
        (100, {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}),
        (800, {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 100}}),
        # dynamic scaling begins at max_position_embeddings, whatever the original number is
        (100, {"rope_type": "dynamic", "original_max_position_embeddings": 200}),
    ],
)
def test_position_scaling_of_only_some_layers_is_refused_too(folder, max_positions, rope):
    config = find_model(Policy(model_name=str(folder))).config
    config.max_position_embeddings, config.rope_parameters = max_positions, rope
    source = ModelSource("it", folder, config)
    check_packable(source, Policy(max_total_sequence_length=100))
    with pytest.raises(ConfigError, match=r"beyond 100 tokens its (dynamic|longrope) position scaling depends on"):
        check_packable(source, Policy(max_total_sequence_length=101))


@pytest.mark.parametrize(
    ("device", "policy", "kind"),
    [
        ("cuda", {}, "flex"),
        ("cuda", {"attention": "sdpa"}, "sdpa"),
        ("cpu", {}, "trees"),
        ("cpu", {"attention": "sdpa"}, "trees"),
        ("cpu", {"compile": True}, "sdpa"),
    ],
)
def test_attention_is_computed_tree_by_tree_on_an_uncompiled_cpu(device, policy, kind):
    assert attention_kind(Policy(**policy), torch.device(device), None) == kind


@pytest.mark.parametrize(
    ("sizes", "smallest"),
    [({}, 8), ({"head_dim": 32}, 32), ({"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": None}, 2)],
)
def test_heads_too_small_for_flex_attention_use_dense_masks_on_a_gpu(sizes, smallest):
    config, cuda = tiny_config("llama", **sizes), torch.device("cuda")
    assert smallest_head(config) == smallest
    assert attention_kind(Policy(), cuda, config) == ("flex" if smallest >= 16 else "sdpa")
    if smallest < 16:
        with pytest.raises(ConfigError, match=rf"at least 16 numbers, and those of this model have {smallest}\. Use "):
            attention_kind(Policy(attention="flex"), cuda, config)


def test_the_smallest_head_of_compressed_attention_is_that_of_its_values():
    config = tiny_config("deepseek_v3", v_head_dim=8, qk_nope_head_dim=16, qk_rope_head_dim=16)
    assert attention_kind(Policy(), torch.device("cuda"), config) == "sdpa"


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="this transformers has no Gemma 4")
def test_heads_that_differ_from_layer_to_layer():
    """Gemma 4 has larger heads in layers without a window, and recent versions of transformers refuse to give one size."""
    kinds = ["sliding_attention", "full_attention"]
    config = tiny_config("gemma4_text", global_head_dim=32, sliding_window=7, layer_types=kinds)
    if differ := different_settings(config):
        assert differ == {"head_dim"}
        assert values_of(config, "head_dim") == [8, 32]
        with torch.device("meta"):
            assert layers_of(AutoModelForCausalLM.from_config(config)).head_dim == 32
    assert smallest_head(config) == 8
    assert values_of(config, "num_attention_heads") == [4]
    assert (
        values_of(config, "no_such_setting")
        == values_of(SimpleNamespace(num_attention_heads=0), "num_attention_heads")
        == []
    )
    assert values_of(SimpleNamespace(intermediate_size=[8, None, 0, 16]), "intermediate_size") == [8, 16]


def test_flex_attention_is_refused_on_the_cpu():
    with pytest.raises(ConfigError) as refused:
        attention_kind(Policy(attention="flex"), CPU, None)
    assert str(refused.value) == (
        "policy.attention = flex: FlexAttention has no backward pass on the CPU. Use policy.attention=auto or sdpa."
    )


def test_dropout_and_jitter_are_disabled_and_reported(folder):
    source = find_model(
        Policy(model_name=str(rewrite_config(folder, attention_dropout=0.25, router_jitter_noise=0.01)))
    )
    assert architecture_of(source.config).random_settings == {"attention_dropout": 0.25, "router_jitter_noise": 0.01}
    policy = load_policy(source, Policy(), CPU)
    assert not any(module.training for module in policy.model.modules())


@pytest.mark.parametrize("mode", ["batch", "none"])
def test_a_model_with_dropout_computes_the_same_twice_even_with_gradients(folder, mode):
    source = find_model(Policy(model_name=str(rewrite_config(folder, attention_dropout=0.25))))
    policy = load_policy(source, Policy(packing=Packing(mode=mode)), CPU)
    preference = random_preference(np.random.default_rng(0))
    pack = lay_out([0], [preference], length=128, arrangement="shared" if mode == "batch" else "separate")
    inputs = policy.inputs(pack, CPU)
    assert torch.equal(policy(inputs), policy(inputs))


@pytest.mark.parametrize(
    ("renamed", "num_missing", "first"),
    [
        # a saved classifier or trunk: without the head
        ({"lm_head.weight": None}, "1 of its 21", "lm_head.weight"),
        # a saved compiled module
        ({"": "_orig_mod."}, "21 of its 21", "lm_head.weight"),
        ({"model.layers.1.mlp.up_proj.weight": None}, "1 of its 21", "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_a_model_with_weights_in_no_file_is_refused_instead_of_made_random(tmp_path, renamed, num_missing, first):
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path)
    ((start, other),) = renamed.items()
    file = tmp_path / "model.safetensors"
    tensors = {
        name if not name.startswith(start) else f"{other}{name}": tensor
        for name, tensor in load_file(file).items()
        if not (other is None and name.startswith(start))
    }
    save_file(tensors, file, metadata={"format": "pt"})
    policy = Policy(model_name=str(tmp_path))
    with pytest.raises(ConfigError) as error:
        load_policy(find_model(policy), policy, torch.device("cpu"))
    assert str(error.value) == (
        f"policy.model_name = {tmp_path}: {num_missing} weights, such as {first}, are in none of its files and would be random. "
        "Is it a causal language model, saved completely, with the weight names that transformers uses?"
    )


def test_a_tied_head_is_not_missing(tmp_path):
    AutoModelForCausalLM.from_config(tiny_config("llama", tie_word_embeddings=True)).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    policy = Policy(model_name=str(tmp_path))
    load_policy(find_model(policy), policy, torch.device("cpu"))


def test_weights_load_as_float32_whatever_their_dtype_on_disk(folder):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    source = find_model(Policy(model_name=str(folder)))
    assert source.dtype == torch.bfloat16
    assert {p.dtype for p in load_policy(source, Policy(), CPU).parameters()} == {torch.float32}


def test_a_quantised_model_is_refused_instead_of_trained_in_part(folder):
    from safetensors.torch import load_file, save_file
    from transformers.integrations.bitnet import pack_weights

    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name.replace(".weight", ".weight_scale")] = torch.ones(1)
        weights[name] = pack_weights(weights[name].sign())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(folder, quantization_config={"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]})
    with pytest.raises(ConfigError) as refused:
        load_policy(find_model(Policy(model_name=str(folder))), Policy(), CPU)
    assert str(refused.value) == (
        f"policy.model_name = {folder}: its weights are quantised (bitnet), so only its embeddings and norms would be trained. "
        "Give the model that it was quantised from."
    )


def test_an_export_of_plain_weights_is_not_marked_as_quantised(folder, tmp_path):
    # gpt-oss is published in MXFP4, and loads in bfloat16 where MXFP4 kernels are missing.
    source = find_model(Policy(model_name=str(rewrite_config(folder, quantization_config={"quant_method": "mxfp4"}))))
    model = AutoModelForCausalLM.from_config(find_model(Policy(model_name="embedded")).config)
    saved = _empty_model(as_policy(model), source.config, torch.float32)
    assert not hasattr(saved.config, "quantization_config")


def test_the_fingerprint_depends_on_content_and_not_on_the_path(folder, tmp_path):
    def of(path):
        return weights_fingerprint(find_model(Policy(model_name=str(path))))

    before = of(folder)
    assert of(shutil.copytree(folder, tmp_path / "elsewhere")) == before
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert of(folder) != before


def test_windows_of_returns_the_windows_of_all_layers_and_none():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("gemma3_text"))
    assert windows_of(model) == {None, 7}


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(folder, tmp_path):
    small = rewrite_config(shutil.copytree(folder, tmp_path / "small"), vocab_size=300)
    with pytest.raises(ConfigError, match=r"the tokenizer gives token id \d+, but the model has only 300 tokens"):
        set_up(Config(policy=Policy(model_name=str(small))), CPU)


def test_leaving_the_process_group_twice_is_harmless():
    leave_process_group()
    leave_process_group()
    assert not torch.distributed.is_initialized()
