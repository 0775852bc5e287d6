"""Malicious models: weights outside their folder, and configurations that would exhaust memory or never finish."""

import json
import multiprocessing
import os
import pickle
import shutil
import time
from dataclasses import replace

import pytest
import torch
from adapters import trained_adapter
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tandem.config.sections.policy import Lora, Policy
from tandem.errors import ConfigError
from tandem.model.architecture import check_packable
from tandem.model.files.folder import MAX_JSON_BYTES, read_json, refuse_wrong_types
from tandem.model.files.source import find_model, weights_fingerprint
from tandem.model.files.tiny import tiny_model
from tandem.model.load import empty_model, load_policy
from tandem.model.lora import targets as lora
from tandem.model.lora.files import read_adapter
from tandem.model.lora.layers import plan_lora

CPU = torch.device("cpu")


class Exploit:
    def __reduce__(self):
        return os.mkdir, (os.environ["TANDEM_EXPLOIT"],)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(tiny_model(), tmp_path / "model")


@pytest.fixture
def sharded(folder):
    """The embedded model in two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:10], "model-00002-of-00002.safetensors": names[10:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    set_index(folder, {name: file for file, part in shards.items() for name in part})
    return folder


def set_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def rename_shard(folder, new):
    """Change the name of one file in the index."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    set_index(folder, {k: new if v == "model-00002-of-00002.safetensors" else v for k, v in index.items()})


def rewrite_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def found(folder):
    return find_model(Policy(model_name=str(folder)))


def refusal(folder):
    with pytest.raises(ConfigError) as refused:
        found(folder)
    return str(refused.value)


# Weights


def test_a_sharded_model_loads_with_the_weights_of_all_its_files(sharded):
    source = found(sharded)
    assert source.stored.num_tensors == 38
    weights = load_policy(source, Policy(), CPU).model.state_dict()
    expected = load_file(tiny_model() / "model.safetensors")
    assert all(torch.equal(weights[name], tensor.float()) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "name",
    [
        "evil.bin", "../other/model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", ".hidden.safetensors",
        "a\x1b[2Jb.safetensors", "C:\\model.safetensors", 5, None, ["model.safetensors"],
    ],
)  # fmt: skip
def test_an_index_may_only_name_files_in_its_own_folder(sharded, name, tmp_path, monkeypatch):
    exploit = tmp_path / "exploited"
    monkeypatch.setenv("TANDEM_EXPLOIT", str(exploit))
    (sharded / "evil.bin").write_bytes(pickle.dumps(Exploit()))
    for elsewhere in (tmp_path / "other", sharded / "sub"):
        shutil.copytree(tiny_model(), elsewhere)
    rename_shard(sharded, name)
    assert refusal(sharded) == (
        f"policy.model_name = {sharded}: {sharded}/model.safetensors.index.json names {json.dumps(name)} as weights. Only "
        ".safetensors files in the folder itself are read; save the model again with transformers' save_pretrained."
    )
    assert not exploit.exists()


@pytest.mark.parametrize("content", [{"metadata": {}}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": "x"}])
def test_an_index_without_a_weight_map_is_refused(sharded, content):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps(content))
    assert refusal(sharded) == (
        f"policy.model_name = {sharded}: {index} has no weight_map, so it is not an index of weights. Download it again."
    )


def test_an_index_that_names_a_missing_file_is_refused(sharded):
    missing = sharded / "model-00002-of-00002.safetensors"
    missing.unlink()
    assert refusal(sharded) == (
        f"policy.model_name = {sharded}: {missing} is missing or is not a file. Is the download complete?"
    )


def test_config_json_may_only_name_weights_in_its_own_folder(folder):
    rewrite_config(folder, transformers_weights="../other/model.safetensors")
    assert refusal(folder) == (
        f'policy.model_name = {folder}: {folder}/config.json names "../other/model.safetensors" as weights. Only .safetensors '
        "files in the folder itself are read; save the model again with transformers' save_pretrained."
    )


@pytest.mark.parametrize("file", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_a_link_to_weights_outside_the_folder_is_refused(folder, tmp_path, file):
    elsewhere = tmp_path / "private.safetensors"
    (folder / "model.safetensors").rename(elsewhere)
    (folder / file).symlink_to(elsewhere)
    if file != "model.safetensors":
        set_index(folder, {"a": file})
    assert refusal(folder) == (
        f"policy.model_name = {folder}: {folder / file} is a link to {elsewhere}, which is outside its folder, and weights are "
        "read only from the folder itself. Replace the link with a copy of the file."
    )


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_link_to_settings_elsewhere_is_refused(folder, tmp_path, file):
    """Else what is in a user's own JSON file would be in the model that is exported."""
    private = (folder / file).rename(tmp_path / "private.json")
    (folder / file).symlink_to(private)
    assert refusal(folder) == (
        f"{folder}/{file}: a link to {private}, outside the model's folder. Model files are read only from that folder. Replace "
        "the link with a copy of the file."
    )
    inside = private.rename(folder / "inside.json")
    (folder / file).unlink()
    (folder / file).symlink_to(inside)
    found(folder)


def test_links_into_the_blobs_of_the_hubs_cache_are_read(folder, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert weights_fingerprint(found(snapshot)) == weights_fingerprint(found(tiny_model()))


def test_the_fingerprint_covers_exactly_the_files_that_are_read(sharded):
    before = weights_fingerprint(found(sharded))
    save_file({"x": torch.ones(3)}, sharded / "consolidated.safetensors")
    assert weights_fingerprint(found(sharded)) == before
    file = sharded / "model-00002-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_fingerprint(found(sharded)) != before


def test_a_part_of_a_distributed_checkpoint_is_refused(folder):
    save_file({"x": torch.ones(3)}, folder / "shard-00000-model-00001-of-00001.safetensors")
    assert refusal(folder) == (
        f"policy.model_name = {folder}: {folder} holds part of a distributed checkpoint "
        "(shard-00000-model-00001-of-00001.safetensors), which tandem does not read. Save the model again with transformers' "
        "save_pretrained."
    )


def test_an_adapter_next_to_a_model_is_refused(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    assert refusal(folder) == (
        f"policy.model_name = {folder}: {folder} holds an adapter (adapter_config.json) next to the model, and transformers "
        "would add it to the weights. Move the adapter to a separate folder and set policy.lora.adapter to that folder."
    )


def test_weights_with_an_unexpected_file_name_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    assert refusal(folder) == (
        f"policy.model_name = {folder}: {folder} holds neither model.safetensors nor model.safetensors.index.json, so "
        "transformers does not know which weights to read. Save the model again with transformers' save_pretrained."
    )


def test_a_pickle_named_as_safetensors_is_refused_and_never_unpickled(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_EXPLOIT", str(tmp_path / "exploited"))
    (folder / "model.safetensors").write_bytes(pickle.dumps(Exploit()))
    assert refusal(folder).startswith(
        f"policy.model_name = {folder}: its weights are not readable as safetensors (Error while deserializing header: "
    )
    assert not (tmp_path / "exploited").exists()


# Adapters


@pytest.fixture
def adapter(tmp_path):
    return trained_adapter(tiny_model(), tmp_path / "adapter")


def refused_adapter(adapter):
    with pytest.raises(ConfigError) as refused:
        read_adapter(str(adapter))
    return str(refused.value)


def test_an_adapter_that_links_to_weights_outside_its_folder_is_refused(adapter, tmp_path):
    elsewhere = tmp_path / "private.safetensors"
    (adapter / "adapter_model.safetensors").rename(elsewhere)
    (adapter / "adapter_model.safetensors").symlink_to(elsewhere)
    assert refused_adapter(adapter) == (
        f"policy.lora.adapter = {adapter}: {adapter}/adapter_model.safetensors is a link to {elsewhere}, which is outside its "
        "folder, and weights are read only from the folder itself. Replace the link with a copy of the file."
    )


@pytest.mark.parametrize("changes", [{"lora_alpha": float("inf")}, {"lora_alpha": float("nan")}, {"r": 0}, {"r": True}])
def test_an_adapter_with_invalid_settings_is_refused(adapter, changes):
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    assert refused_adapter(adapter) == (
        f"policy.lora.adapter = {adapter}: its adapter_config.json has no valid r and lora_alpha, so it is not a LoRA adapter. "
        "Save it again with peft."
    )


# Configurations


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**8),
        ("num_labels", 10**9),
        ("num_attention_heads", 10**15),
        ("num_local_experts", 10**7),
    ],
)
def test_impossibly_large_counts_are_refused_before_anything_is_built(folder, key, value):
    rewrite_config(folder, **{key: value})
    began = time.monotonic()
    assert refusal(folder) == (
        f"policy.model_name = {folder}: {folder}/config.json asks for {key} = {value}, but the weight files hold 38 tensors. "
        "Download the model again, or choose another."
    )
    assert time.monotonic() - began < 5


def test_large_counts_in_a_nested_section_are_refused_too(folder):
    rewrite_config(folder, vision_config={"parts": [{"num_layers": 10**9}]})
    assert "asks for num_layers = 1000000000, but the weight files hold 38 tensors." in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_hidden_layers": 65_000, "hidden_size": 8, "intermediate_size": 8, "head_dim": 2}, "2,760 modules"),
        ({"intermediate_size": 10**10}, "167,247,360 weights"),
        ({"vocab_size": 10**9}, "167,247,360 weights"),
    ],
)
def test_a_model_far_larger_than_its_weight_files_is_refused_while_it_is_built(folder, changes, what):
    rewrite_config(folder, **changes)
    source = found(folder)
    check_packable(source, Policy())
    with pytest.raises(ConfigError) as refused:
        empty_model(source)
    assert str(refused.value) == (
        f"policy.model_name = {folder}: its config.json describes a model with more than {what}, but its weight files hold "
        "38 tensors in 4,202,960 bytes. Download the model again, or choose another."
    )
    assert len(list(empty_model(found(tiny_model())).modules())) == 59  # the limits no longer apply


def nested(depth, opening="[", closing="]"):
    return opening * depth + closing * depth


@pytest.mark.parametrize("depth", [65, 900, 100_000])
def test_a_deeply_nested_config_json_is_refused(folder, depth):
    (folder / "config.json").write_text(f'{{"model_type": "llama", "x": {nested(depth - 1)}}}')
    assert refusal(folder) == (
        f"{folder}/config.json: nested more than 64 levels deep, unlike any real file. Download it again."
    )


def test_json_of_64_levels_is_read(tmp_path):
    file = tmp_path / "some.json"
    file.write_text(f'{{"x": {nested(63)}}}')
    assert list(read_json(file)) == ["x"]


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("null", "NoneType"), ('"x"', "str"), ("3", "int")])
def test_json_that_is_not_an_object_is_refused(folder, text, kind):
    (folder / "config.json").write_text(text)
    assert refusal(folder) == (f"{folder}/config.json: holds a {kind}, not a JSON object. Download it again.")


def test_a_config_json_of_a_terabyte_is_not_read(folder):
    with (folder / "config.json").open("r+b") as file:
        file.truncate(10**12)  # takes no space on the disk
    assert refusal(folder) == (
        f"{folder}/config.json: 1,000,000,000,000 bytes, over the limit of {MAX_JSON_BYTES:,} for a JSON file. "
        "Download it again."
    )


@pytest.mark.parametrize("model_type", [["llama"], {"a": 1}, 5, None])
def test_a_model_type_that_is_not_a_string_is_refused_in_one_message(folder, model_type):
    rewrite_config(folder, model_type=model_type, auto_map={})
    assert refusal(folder).startswith(f"policy.model_name = {folder}: ")


@pytest.mark.parametrize("dtype", ["nn", "int8", "float", "compile"])
def test_a_dtype_that_is_not_a_floating_point_type_is_refused(folder, dtype):
    source = replace(found(folder), config=LlamaConfig())
    source.config.dtype = dtype
    if dtype == "float":  # another name of float32
        assert source.dtype == torch.float32
        return
    with pytest.raises(ConfigError) as refused:
        check_packable(source, Policy())
    assert str(refused.value) == (
        f"policy.model_name = {folder}: {folder}/config.json has dtype = {dtype}, which is not a floating-point dtype of torch. "
        "Download the model again, or choose another."
    )


@pytest.mark.parametrize(
    ("key", "value", "shown", "wanted"),
    [
        ("attention_chunk_size", "8", '"8"', "a number"),
        ("index_topk", [1], "[1]", "a number"),
        ("max_seq_len", 10**400, f"1{'0' * 99}…", "a number"),
        ("num_experts_per_tok", float("nan"), "NaN", "a number"),
        ("layer_types", ["full_attention", 5], '["full_attention", 5]', "a list of names"),
    ],
)
def test_a_setting_of_the_wrong_type_is_refused_by_name(folder, key, value, shown, wanted):
    config = LlamaConfig()
    setattr(config, key, value)
    with pytest.raises(ConfigError) as refused:
        refuse_wrong_types("policy.model_name = m", folder, config)
    assert str(refused.value) == (
        f"policy.model_name = m: {folder}/config.json has {key} = {shown}, which is not {wanted}. Download the model again, or "
        "choose another."
    )


@pytest.mark.parametrize(("value", "shown"), [(5, "5"), ({"a": 1}, '{"a": 1}')])
def test_a_language_model_that_is_no_object_is_refused(folder, value, shown):
    rewrite_config(folder, decoder=value)
    with pytest.raises(ConfigError) as refused:
        find_model(Policy(model_name=str(folder)))
    assert str(refused.value) == (
        f"policy.model_name = {folder}: {folder}/config.json describes its language model with {shown}, which is not an object. "
        "Download the model again, or choose another."
    )


@pytest.mark.skipif(not hasattr(LlamaConfig(), "per_layer_attributes"), reason="of later versions of transformers")
@pytest.mark.parametrize(
    ("different", "is_refused"), [("max_position_embeddings", True), ("num_key_value_heads", False)]
)
def test_layers_that_differ_in_what_is_computed_with_once_are_refused(folder, different, is_refused):
    rewrite_config(folder, per_layer_config={"1": {different: 4}})
    if not is_refused:
        find_model(Policy(model_name=str(folder)))
        return
    with pytest.raises(ConfigError) as refused:
        find_model(Policy(model_name=str(folder)))
    assert str(refused.value) == (
        f"policy.model_name = {folder}: {folder}/config.json has a different {different} for some layers, which tandem does not "
        "support. Choose another model."
    )


@pytest.mark.parametrize("value", ["many", {"a": 1}, 10**400])
def test_positions_that_are_not_a_number_are_refused(folder, value):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": value}
    rewrite_config(folder, rope_parameters=rope)
    assert refusal(folder).startswith(f"policy.model_name = {folder}: ")


def test_a_configuration_that_replaces_layers_is_refused(folder):
    rewrite_config(folder, fusion_config={"patch_embeddings": True})
    assert refusal(folder) == (
        f"policy.model_name = {folder}: {folder}/config.json has a fusion_config, which makes transformers replace layers of "
        "every model in the process. tandem trains the layers as they are; remove fusion_config."
    )


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        *((given, "which is not a mapping with a quant_method") for given in (5, "fp8", ["a"])),
        ({"quant_method": 5}, "whose quant_method is not a text"),
    ],
)
@pytest.mark.parametrize("inner", [True, False])
def test_a_quantisation_without_a_valid_method_is_refused(folder, given, problem, inner):
    rewrite_config(
        folder, **{"text_config": {"quantization_config": given}} if inner else {"quantization_config": given}
    )
    assert refusal(folder) == (
        f"policy.model_name = {folder}: {folder}/config.json has quantization_config = {json.dumps(given)}, {problem}. "
        "Download the model again, or choose another."
    )


def test_loading_a_model_far_larger_than_its_weight_files_is_refused(folder):
    rewrite_config(folder, vocab_size=10**7)
    with pytest.raises(
        ConfigError, match=r"describes a model with more than [0-9,]+ weights, but its weight files hold"
    ):
        load_policy(found(folder), Policy(), CPU)


# Patterns


def planned(pattern):
    return plan_lora(found(tiny_model()), Lora(enabled=True, target_modules=pattern), CPU, "float32")


def test_a_regular_expression_that_never_finishes_is_refused(monkeypatch):
    monkeypatch.setattr(lora, "PATTERN_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(ConfigError) as refused:
        planned(r"(([a-z0-9._])+)+!")
    assert str(refused.value) == (
        "policy.lora.target_modules: matching the regular expression (([a-z0-9._])+)+! with the names of 29 layers takes more "
        "than 0.5 seconds. Give a simpler one, or a list of names."
    )
    assert time.monotonic() - began < 20
    assert not multiprocessing.active_children()


def test_a_regular_expression_nested_too_deeply_is_refused():
    with pytest.raises(ValidationError, match="is not a valid regular expression"):
        Lora(enabled=True, target_modules="(" * 5000 + "a" + ")" * 5000)
