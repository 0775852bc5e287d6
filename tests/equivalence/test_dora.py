"""DoRA: layers, training, resuming and exports equal those of peft, and new adapters change nothing."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from adapters import (
    assert_export_is_as_in_memory,
    assert_same_logps,
    few_pairs_with_cache,
    plain_losses,
    plain_model,
    set_up_with,
    trained_adapter,
    with_adapter,
)
from models import as_policy, model_folder, plain_token_logps, random_preference
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from running import killed_after, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file
from torch import nn

from tandem.model.distributed.layers import freeze, shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.lora import magnitudes
from tandem.model.lora.adapters import load_adapted
from tandem.model.lora.dora import DoraLinear, add_magnitudes
from tandem.model.lora.magnitudes import begin
from tandem.packing.layout import lay_out
from tandem.training.start.references import load_sharded

CPU = torch.device("cpu")
RATE = 1e-3
TARGETS = ["q_proj", "down_proj"]
DORA = [
    *("policy.lora.enabled=true", "policy.lora.use_dora=true", "policy.lora.dim=4"),
    *("policy.lora.target_modules=[q_proj,down_proj]", f"policy.optimizer.kwargs.lr={RATE}"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Its adapted layers have biases."""
    return model_folder(tmp_path_factory.mktemp("base") / "model", "qwen2", initializer_range=0.05)


@pytest.fixture(scope="module")
def data(base, tmp_path_factory):
    return [*few_pairs_with_cache(tmp_path_factory.mktemp("data")), f"policy.model_name={base}"]


def randomise(model, *, seed=2):
    """Give adapters values far from where they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_magnitude" in name:
                parameter.mul_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


# One layer


class FixedDropout(nn.Module):
    """The same numbers are dropped in every call."""

    def forward(self, x):
        return x * (torch.arange(x.shape[-1]) % 3 > 0) * 1.5


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(6, 20), (20, 6)])
def test_a_layer_equals_pefts_with_its_gradients(inputs, outputs, has_bias, dropout):
    torch.manual_seed(0)
    weights = nn.Linear(inputs, outputs, bias=has_bias)
    layers = []
    for ours in (False, True):
        model = nn.ModuleDict({"a": nn.Linear(inputs, outputs, bias=has_bias)})
        model.load_state_dict({f"a.{name}": tensor for name, tensor in weights.state_dict().items()})
        config = LoraConfig(r=3, lora_alpha=5, target_modules=["a"], use_dora=not ours, lora_dropout=0.5 * dropout)
        inject_adapter_in_model(config, model)
        if ours:
            add_magnitudes(model, "default")
            begin(model)
        if dropout:
            model["a"].lora_dropout["default"] = FixedDropout()
        layers.append(model)
    randomise(layers[0])
    with torch.no_grad():  # peft's weights, and where they differ in the row lengths, the same magnitudes
        for (name, ours), (other, theirs) in zip(
            layers[1].named_parameters(), layers[0].named_parameters(), strict=True
        ):
            assert name == other
            ours.copy_(theirs)
    x, outer = torch.randn(2, 5, inputs, requires_grad=True), torch.randn(2, 5, outputs)
    found = []
    for model in layers:
        out = model.train()["a"](x)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found.append([out, *torch.autograd.grad(out, (x, *trained), outer)])
    assert type(layers[1]["a"]) is DoraLinear
    assert len(found[0]) == 5
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_new_magnitudes_change_no_bit_and_rows_of_zeros_stay_finite():
    torch.manual_seed(0)
    model, plain = nn.ModuleDict({"a": nn.Linear(6, 20)}), nn.Linear(6, 20)
    with torch.no_grad():
        plain.weight[3] = 0
    model["a"].load_state_dict(plain.state_dict())
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["a"]), model)
    add_magnitudes(model, "default")
    begin(model)
    x = torch.randn(5, 6)
    low = F.linear(x, model["a"].lora_A["default"].weight)
    joined = F.linear(torch.cat([x, low], -1), torch.cat([plain.weight, torch.zeros(20, 3)], 1)) + plain.bias
    assert torch.equal(model["a"](x), joined)


def test_a_compiled_layer_uses_lengths_of_updated_weights():
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"a": nn.Linear(6, 20)}), torch.randn(5, 6)
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["a"]), model)
    add_magnitudes(model, "default")
    begin(model)
    torch._dynamo.reset()
    compiled, held = torch.compile(model["a"], fullgraph=True, backend="aot_eager"), magnitudes.Magnitudes
    lengths = held(model, bfloat16=False)
    for seed in (1, 2):
        randomise(model, seed=seed)
        with lengths.held(), torch._dynamo.config.patch(error_on_recompile=seed == 2):
            torch.testing.assert_close(compiled(x), model["a"](x), rtol=1e-6, atol=1e-6)
        model["a"].row_lengths.mul_(2)  # not used: lengths are computed when the next `held` begins


def test_row_lengths_computed_in_parts_are_the_same(monkeypatch):
    torch.manual_seed(0)
    given = torch.randn(10, 7), torch.randn(2, 7), torch.randn(10, 2), 1.5
    whole = magnitudes.row_lengths(*given)
    monkeypatch.setattr(magnitudes, "NUMBERS_AT_ONCE", 21)
    torch.testing.assert_close(magnitudes.row_lengths(*given), whole, rtol=1e-6, atol=0)
    torch.testing.assert_close(whole, (given[0] + 1.5 * given[2] @ given[1]).norm(dim=1), rtol=1e-6, atol=0)


# A model


def test_packed_logps_and_gradients_equal_peft_on_each_sequence_alone(base, tmp_path):
    import numpy as np

    rng = np.random.default_rng(7)
    preferences = [random_preference(rng, num_completions=n) for n in (2, 3, 4)]
    adapter = trained_adapter(base, tmp_path / "adapter", use_dora=True)
    theirs = PeftModel.from_pretrained(plain_model(base), adapter, is_trainable=True)
    setup = set_up_with(f"policy.model_name={base}", "policy.lora.enabled=true", f"policy.lora.adapter={adapter}")
    assert setup.lora.dora
    ours = load_adapted(setup.source, setup.config.policy, CPU, setup.lora).model
    outer = torch.randn(1000, generator=torch.Generator().manual_seed(1))

    def gradients(model, logps):
        (logps * outer[: len(logps)]).sum().backward()
        named = {name.removeprefix("base_model.model."): p.grad for name, p in model.named_parameters()}
        return {name: gradient for name, gradient in named.items() if gradient is not None}

    plain = torch.cat([logps for preference in preferences for logps in plain_token_logps(theirs, preference)])
    want = gradients(theirs, plain)
    policy = shard(as_policy(ours), join_process_group(), bfloat16=False)
    inputs = policy.inputs(lay_out(range(3), preferences, length=256), CPU)
    with policy.computing():
        packed = policy(inputs)[: inputs.num_scored]
        got = gradients(ours, packed)
    torch.testing.assert_close(packed, plain, atol=2e-5, rtol=0)
    assert got.keys() == want.keys()
    assert len(got) == 2 * 2 * 3
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= 2e-5 * gradient.abs().max() + 1e-9, name


# A run


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run that exports only adapters."""
    settings = [*data, *DORA, "export.merge_lora=false", "dpo.val_at_end=true", "policy.packing.pack_length=256"]
    return short_run(tmp_path_factory.mktemp("dora") / "run", *settings), settings


def test_a_run_trains_the_same_weights_as_peft_in_a_plain_loop(base, trained):
    """The plain loop uses the peft model, one sequence at a time, and full logits."""
    run, settings = trained
    setup = set_up_with(*settings)
    torch.manual_seed(setup.config.run.seed)
    own = dict(load_adapted(setup.source, setup.config.policy, CPU, setup.lora).trained())
    wanted = LoraConfig(r=4, lora_alpha=32, use_dora=True, target_modules=TARGETS, task_type="CAUSAL_LM")
    model, start = get_peft_model(plain_model(base), wanted), plain_model(base)
    named = {name.removeprefix("base_model."): p for name, p in model.named_parameters() if p.requires_grad}
    assert named.keys() == own.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            if "magnitude" in name:  # both start at the lengths of rows
                torch.testing.assert_close(parameter, own[name], rtol=1e-6, atol=0)
            parameter.copy_(own[name])
    optimizer = torch.optim.AdamW(named.values(), lr=RATE, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-5)
    losses = plain_losses(model, start, setup, optimizer)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    assert [line["loss"] for line in metrics_of(run)] == pytest.approx(losses, rel=2e-5)
    saved = load_file(run / "model" / "adapter_model.safetensors")
    want = {f"base_{name.replace('.default', '')}": p.detach() for name, p in named.items()}
    want = {f"base_model.{name.removeprefix('base_')}": p for name, p in want.items()}
    want = {name.replace("magnitude_vector.weight", "magnitude_vector"): p for name, p in want.items()}
    assert largest_difference(saved, want) < 2e-4


def test_exports_are_the_model_in_memory_load_in_peft_and_merge_as_in_peft(base, trained, tmp_path):
    run, settings = trained
    assert json.loads((run / "model" / "adapter_config.json").read_text())["use_dora"] is True
    merged = short_run(tmp_path / "merged", *settings, "export.merge_lora=true", "checkpointing.enabled=false")
    by_peft = with_adapter(base, run / "model")
    assert_same_logps(plain_model(merged / "model"), by_peft, set_up_with(*settings))
    for one in (run, merged):
        assert_export_is_as_in_memory(one)
    by_hand = by_peft.merge_and_unload().state_dict()
    found, start = weights_of(merged), load_file(base / "model.safetensors")
    assert largest_difference(found, {name: by_hand[name] for name in found}) < 1e-6
    moved = {name for name in start if not torch.equal(start[name], found[name])}
    assert moved == {
        f"model.layers.{i}.{one}.weight" for i in range(2) for one in ("self_attn.q_proj", "mlp.down_proj")
    }


@pytest.mark.parametrize("mode", ["cached", "live"])
def test_a_trained_adapter_is_the_start_and_the_reference(base, data, trained, tmp_path, mode):
    run, _ = trained
    settings = [*data, "policy.lora.enabled=true", f"policy.lora.adapter={run}/model", f"reference.mode={mode}"]
    first, second = metrics_of(short_run(tmp_path / "run", *settings, "dpo.max_num_steps=2"))
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert abs(second["loss"] - first["loss"]) > 1e-6
    setup = set_up_with(*settings)
    loaded = load_adapted(setup.source, setup.config.policy, CPU, setup.lora)
    assert_same_logps(loaded.model, with_adapter(base, run / "model"), setup)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(data, trained, tmp_path):
    _, settings = trained
    settings = [*settings, "checkpointing.save_period=2", "policy.lora.dropout=0.2", "dpo.val_at_end=false"]
    whole = short_run(tmp_path / "whole", *settings)
    with killed_after(3):
        short_run(tmp_path / "cut", *settings)
    cut = short_run(tmp_path / "cut", *settings)
    assert metrics_of(cut) == metrics_of(whole)
    files = [load_file(run / "model" / "adapter_model.safetensors") for run in (cut, whole)]
    assert largest_difference(*files) == 0.0


def test_row_lengths_are_computed_once_per_step_and_not_in_every_pack(trained, monkeypatch):
    _, settings = trained
    setup = set_up_with(*settings)
    policy = load_sharded(setup, setup.source, join_process_group(), setup.lora)
    calls, compute = [], magnitudes.row_lengths
    monkeypatch.setattr(magnitudes, "row_lengths", lambda *given: calls.append(given) or compute(*given))
    with policy.computing():
        for index in range(3):
            pack = setup.plan.train.row([index], 1024)
            policy(policy.inputs(pack, CPU)).sum().backward()
    assert len(calls) == len(setup.lora.targets) == 4


# In bfloat16


def bfloat16_policy(settings, **overrides):
    given = [f"policy.{name}={value}" for name, value in overrides.items()]
    setup = set_up_with(*settings, "policy.precision=bfloat16", *given)
    return setup, load_sharded(setup, setup.source, join_process_group(), setup.lora)


@pytest.mark.bfloat16
def test_in_bfloat16_new_magnitudes_change_nothing_and_trained_ones_keep_their_digits(trained):
    _, settings = trained
    _, policy = bfloat16_policy(settings)
    layer = next(one for one in policy.model.modules() if isinstance(one, DoraLinear))
    magnitude = layer.lora_magnitude_vector["default"]
    start = magnitude.weight.detach().clone()
    with policy.computing():
        assert magnitude.weight.dtype == torch.bfloat16
        assert torch.equal(magnitudes.factors_of(magnitude.weight, layer.row_lengths), torch.ones_like(start))
    with torch.no_grad():
        magnitude.weight.mul_(1 + 1e-4)  # bfloat16 has no number between 1 and 1 + 2 ** -7
    with policy.computing():
        factors = magnitudes.factors_of(magnitude.weight, layer.row_lengths).detach()
    torch.testing.assert_close(factors, torch.full_like(start, 1 + 1e-4), rtol=2e-6, atol=0)


@pytest.mark.bfloat16
def test_a_frozen_policy_keeps_its_magnitudes(trained):
    run, settings = trained
    kept = [one for one in settings if not one.startswith("policy.lora")]
    start = [*kept, "policy.lora.enabled=true", f"policy.lora.adapter={run}/model"]
    setup, policy = bfloat16_policy(start)
    inputs = policy.inputs(setup.plan.train.row([0], 1024), CPU)
    frozen = freeze(bfloat16_policy(start)[1])
    with torch.no_grad():
        before = policy(inputs)
        assert torch.equal(frozen(inputs), before)
        assert torch.equal(frozen(inputs), before)
