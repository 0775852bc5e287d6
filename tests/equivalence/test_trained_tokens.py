"""Trained embeddings of single tokens: training, resuming and exports equal those of peft."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from adapters import (
    assert_export_is_as_in_memory,
    assert_same,
    assert_same_logps,
    by_peft,
    few_pairs_with_cache,
    in_a_pack,
    plain_losses,
    plain_model,
    set_up_with,
    trained_adapter,
    with_adapter,
)
from models import MODEL, bfloat16_start, model_folder, random_preference
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from running import SHORT, killed_after, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file
from together import run_together

from tandem.model.distributed.layers import freeze, shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.lora.adapters import load_adapted

CPU = torch.device("cpu")
RATE = 1e-3
IDS = [1, 2, 300]  # <|im_start|>, <|im_end|>, " it"
TOKENS = 'policy.lora.trainable_token_indices=["<|im_end|>",300,"<|im_start|>"]'
OPTIONS = [
    *("policy.lora.enabled=true", "policy.lora.dim=4", "policy.lora.target_modules=[q_proj,down_proj]"),
    *(TOKENS, f"policy.optimizer.kwargs.lr={RATE}"),
]
DELTA = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
EMBEDDINGS = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("untied") / "model", "llama", initializer_range=0.05)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return few_pairs_with_cache(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of a model with tied embeddings that exports only adapters, and its configuration."""
    settings = [*data, *OPTIONS, "export.merge_lora=false", "dpo.val_at_end=true", "checkpointing.save_period=2"]
    return short_run(tmp_path_factory.mktemp("tokens") / "run", *settings), settings


def trained_by_peft(base, setup) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train peft's model one sequence at a time. Return the losses and the adapter's weights by their names in files."""
    torch.manual_seed(setup.config.run.seed)
    own = dict(load_adapted(setup.source, setup.config.policy, CPU, setup.lora).trained())
    targets: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "trainable_token_indices": IDS}
    wanted = LoraConfig(r=4, lora_alpha=32, task_type="CAUSAL_LM", **targets)
    model, start = get_peft_model(plain_model(base), wanted), plain_model(base)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with torch.no_grad():
        for name, parameter in parameters.items():
            if "lora_" in name:
                parameter.copy_(own[name.replace("base_model.", "", 1)])
    optimizer = torch.optim.AdamW(list(parameters.values()), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-5)
    losses = plain_losses(model, start, setup, optimizer)
    return losses, {name.replace(".default", ""): parameter.detach() for name, parameter in parameters.items()}


def assert_equals_peft(run, base, settings):
    losses, weights = trained_by_peft(base, set_up_with(*settings))
    assert [line["loss"] for line in metrics_of(run)] == pytest.approx(losses, rel=2e-5)
    found, start = load_file(run / "model" / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    assert largest_difference(found, weights) < 2e-4
    assert (found[DELTA] - start[EMBEDDINGS][IDS]).abs().amax(1).min() > 2e-3  # every row was trained


def test_a_run_with_tied_embeddings_trains_the_same_weights_as_peft_in_a_plain_loop(trained):
    run, settings = trained
    assert_equals_peft(run, MODEL, settings)


@pytest.mark.slow
def test_a_run_with_a_separate_head_trains_the_same_weights_as_peft_in_a_plain_loop(untied, data, tmp_path):
    settings = [
        *data,
        *OPTIONS,
        f"policy.model_name={untied}",
        "export.merge_lora=false",
        "checkpointing.enabled=false",
    ]
    assert_equals_peft(short_run(tmp_path / "run", *settings), untied, settings)


SLOW = [
    pytest.param(family, tied, marks=pytest.mark.slow)
    for family, tied in (("llama", False), ("gemma3_text", False), ("granite", True), ("gemma2", True))
]


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma3_text", True), *SLOW])
def test_packed_logps_and_gradients_equal_peft_on_each_sequence_alone(family, tied, tmp_path):
    """gemma3_text scales its embeddings in their module, gemma2 and granite after it. Two of them change their logits."""
    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n) for n in (2, 3, 4)]
    folder = model_folder(tmp_path / "base", family, initializer_range=0.05, tie_word_embeddings=tied)
    first, second, third = (int(one.prompt[0]) for one in preferences)
    ids = [first, int(preferences[2].completions[0][0]), third, second]
    assert ids != sorted(set(ids))
    adapter = trained_adapter(folder, tmp_path / "adapter", trainable_token_indices=ids)
    found, wanted = in_a_pack(folder, adapter, preferences), by_peft(folder, adapter, preferences)
    rows = wanted.gradients.pop("model.embed_tokens.token_adapter.trainable_tokens_delta.default")
    assert rows.abs().amax(1).min() > 0
    wanted.gradients["model.embed_tokens.trained_rows"] = rows[[ids.index(one) for one in sorted(ids)]]
    assert_same(found, wanted, atol=5e-5)


def test_the_reference_is_the_base_model(trained):
    run, _ = trained
    first = metrics_of(run)[0]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert first["accuracy"] == 0.5


def test_exports_are_the_model_in_memory_and_load_in_peft(trained, tmp_path):
    run, settings = trained
    described = json.loads((run / "model" / "adapter_config.json").read_text())
    assert described["trainable_token_indices"] == IDS
    merged = short_run(tmp_path / "merged", *settings, "export.merge_lora=true", "checkpointing.enabled=false")
    by_peft = AutoPeftModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32, attn_implementation="eager")
    assert_same_logps(plain_model(merged / "model"), by_peft, set_up_with(*settings))
    for one in (run, merged):
        assert_export_is_as_in_memory(one)
    start, end = load_file(MODEL / "model.safetensors"), weights_of(merged)
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    adapted = (f"model.layers.{i}.{one}.weight" for i in range(2) for one in ("self_attn.q_proj", "mlp.down_proj"))
    assert moved == {*adapted, EMBEDDINGS}
    changed = (start[EMBEDDINGS] != end[EMBEDDINGS]).any(1).nonzero()[:, 0]
    assert changed.tolist() == IDS
    assert torch.equal(end[EMBEDDINGS][IDS], load_file(run / "model" / "adapter_model.safetensors")[DELTA])


@pytest.mark.slow
def test_an_export_is_the_start_of_the_next_run_and_its_reference(trained, tmp_path):
    run, settings = trained
    kept = [one for one in settings if not one.startswith("policy.lora")]
    start = [*kept, "policy.lora.enabled=true", f"policy.lora.adapter={run}/model", "dpo.max_num_steps=2"]
    start += ["dpo.val_at_end=false", "checkpointing.enabled=false"]
    first, second = metrics_of(short_run(tmp_path / "run", *start))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(second["loss"] - first["loss"]) > 1e-5
    setup = set_up_with(*start)
    loaded = load_adapted(setup.source, setup.config.policy, CPU, setup.lora)
    assert_same_logps(loaded.model, with_adapter(MODEL, run / "model"), setup)


@pytest.mark.slow
@pytest.mark.bfloat16
def test_in_bfloat16_the_embeddings_in_memory_are_those_of_the_merged_export(data, tmp_path):
    """Rows are rounded stochastically, with the same random bits. Rounded to nearest, most would be those of the start model."""
    base = bfloat16_start(tmp_path / "base")
    adapter = trained_adapter(base, tmp_path / "adapter", trainable_token_indices=IDS)
    settings = [*data, f"policy.model_name={base}", "policy.lora.enabled=true", f"policy.lora.adapter={adapter}"]
    setup = set_up_with(*settings, "policy.precision=bfloat16")
    policy = load_adapted(setup.source, setup.config.policy, CPU, setup.lora)
    frozen = freeze(shard(policy, join_process_group(), bfloat16=True)).model.get_input_embeddings().weight
    assert frozen.dtype == torch.bfloat16
    run = short_run(
        tmp_path / "run",
        *settings,
        "policy.precision=bfloat16",
        "dpo.max_num_steps=1",
        "policy.optimizer.kwargs.lr=1e-30",
    )
    assert torch.equal(weights_of(run)[EMBEDDINGS], frozen)
    assert not torch.equal(frozen[IDS], load_file(adapter / "adapter_model.safetensors")[DELTA].bfloat16())


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(trained, tmp_path):
    run, settings = trained
    with killed_after(3):
        short_run(tmp_path / "cut", *settings)
    cut = short_run(tmp_path / "cut", *settings)
    assert metrics_of(cut) == metrics_of(run)
    files = [load_file(one / "model" / "adapter_model.safetensors") for one in (cut, run)]
    assert largest_difference(*files) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["[5]", "[1,2,300,1500]"])
@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_two_ranks_train_the_same_rows_as_one(data, tmp_path, ids, precision):
    """With one token, the second rank has no row of the parameter; token 1500 is in its shard of the embeddings."""
    base = bfloat16_start(tmp_path / "base")
    given = [one for one in OPTIONS if one != TOKENS]
    settings = [*SHORT, *data, *given, f"policy.lora.trainable_token_indices={ids}", f"policy.precision={precision}"]
    settings += [f"policy.model_name={base}", "policy.optimizer.kwargs.eps=0.01", "checkpointing.enabled=false"]
    settings += ["export.dtype=float32", "dpo.max_num_steps=3"]
    alone = short_run(tmp_path / "alone", *settings)
    run_together(2, [[*settings, f"run.dir={tmp_path / 'together'}"]], tmp_path)
    close = 1e-5 if precision == "float32" else 5e-3
    for this, that in zip(metrics_of(tmp_path / "together"), metrics_of(alone), strict=True):
        assert this["loss"] == pytest.approx(that["loss"], rel=close)
        assert this["grad_norm"] == pytest.approx(that["grad_norm"], rel=10 * close)
    assert largest_difference(weights_of(tmp_path / "together"), weights_of(alone)) < close
