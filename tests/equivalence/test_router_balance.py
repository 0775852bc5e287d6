"""The load-balancing loss of routers does not depend on packs, arrangements or accumulation, and equals transformers'."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adapters import plain_model
from hybrids import WITHOUT_LOGITS
from models import as_policy, model_folder, plain_token_logps, random_preference, tiny_model
from running import SHORT, few_pairs, metrics_of, short_run
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tandem.config.load import load_config
from tandem.model.architecture import TYPES_WITH_BALANCE, decoder_layers, router_class
from tandem.model.distributed.layers import recompute, shard
from tandem.model.distributed.process_group import join_process_group
from tandem.model.router_balance import RouterBalance, _token_weights
from tandem.packing.layout import join, lay_out
from tandem.training.start.setup import set_up
from tandem.training.step import count_experts

CPU = torch.device("cpu")
COEFFICIENT = 0.5
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
HYBRID = {"qwen3_next": LINEAR, "qwen3_5_moe_text": LINEAR}


def family(name, **changes):
    return tiny_model(name, **{**EXPERTS, **HYBRID.get(name, {}), **changes}).eval()


def balanced(model, **settings):
    policy = as_policy(model, **settings)
    routers = router_class(policy.architecture)
    assert routers is not None
    policy.balance = RouterBalance(model, routers, coefficient=COEFFICIENT, ranks=join_process_group())
    return policy


def gradients(policy):
    found = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    policy.zero_grad()
    return found


def own_loss(policy, packs, outer):
    """The value of the loss, and the gradients of a weighted sum of the log-probabilities plus the loss."""
    count_experts(policy, policy.balance, packs, CPU)
    start = 0
    with policy.balance.training() as loss:
        for pack in packs:
            inputs = policy.inputs(pack, CPU)
            logps = policy(inputs)[: inputs.num_scored]
            (logps * outer[start : start + len(logps)]).sum().backward()
            start += len(logps)
    return loss.item(), gradients(policy)


def plain_loss(model, preferences, outer):
    """The same by transformers' function, from the logits of every sequence alone. A prompt of n copies counts 1/n in each."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    logits, weights, logps = [], [], []
    for preference in preferences:
        for completion in preference.completions:
            ids = torch.from_numpy(np.concatenate([preference.prompt, completion]).astype(np.int64))[None]
            out = model(input_ids=ids, use_cache=False, output_router_logits=True)
            logits.append(out.router_logits)
            weights += [1 / len(preference.completions)] * len(preference.prompt) + [1.0] * len(completion)
        logps += plain_token_logps(model, preference)
    by_layer = tuple(torch.cat(layers) for layers in zip(*logits, strict=True))
    loss = load_balancing_loss_func(by_layer, by_layer[0].shape[-1], 2, torch.tensor(weights)[None])
    flat = torch.cat(logps)
    ((flat * outer[: len(flat)]).sum() + COEFFICIENT * loss).backward()
    found = {f"model.{name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), found


def assert_same(got, want):
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        assert (got[1][name] - gradient).abs().max() <= 3e-5 * gradient.abs().max() + 1e-9, name


@pytest.fixture(scope="module")
def preferences():
    rng = np.random.default_rng(7)
    return [random_preference(rng, num_completions=n, max_prompt=20) for n in (2, 3, 4)]


@pytest.fixture(scope="module")
def outer():
    return torch.randn(1000, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", [name for name in TYPES_WITH_BALANCE if name not in WITHOUT_LOGITS])
def test_value_and_gradients_equal_transformers_in_a_plain_loop(name, preferences, outer):
    model = family(name)
    want = plain_loss(model, preferences, outer)
    own = balanced(model)
    packs = [lay_out([i], [preference], length=128) for i, preference in enumerate(preferences)]
    got = own_loss(own, packs, outer)
    assert_same(got, want)
    without = own_loss_switched_off(own, packs, outer)
    routers = [weight for weight in got[1] if weight.endswith((".gate.weight", ".router.weight"))]
    assert routers and all((got[1][one] - without[one]).abs().max() > 1e-4 for one in routers)


def own_loss_switched_off(policy, packs, outer):
    start = 0
    for pack in packs:
        inputs = policy.inputs(pack, CPU)
        logps = policy(inputs)[: inputs.num_scored]
        (logps * outer[start : start + len(logps)]).sum().backward()
        start += len(logps)
    return gradients(policy)


def test_packs_arrangements_and_filler_do_not_change_it(preferences, outer):
    model = family("qwen3_moe")
    want = plain_loss(model, preferences, outer)
    rows = [lay_out([i], [one], length=128) for i, one in enumerate(preferences)]
    filler = lay_out([], [], length=128)
    for packs in (
        [lay_out(range(3), preferences, length=384)],
        [join([rows[0], filler, rows[1]]), rows[2], filler],
        [lay_out(range(3), preferences, length=384, arrangement="repeated")],
        [lay_out([0], preferences[:1], length=40), *(lay_out([i], [preferences[i]], length=40) for i in (1, 2))],
    ):
        assert_same(own_loss(balanced(model), packs, outer), want)
    separate = [lay_out(range(3), preferences, length=64, arrangement="separate")]
    assert_same(own_loss(balanced(model, packed=False), separate, outer), want)


def test_weights_of_positions_by_hand():
    rng = np.random.default_rng(0)
    preference = random_preference(rng, num_completions=2, max_prompt=1, max_completion=1)
    shared = lay_out([0], [preference], length=5)
    repeated = lay_out([0], [preference], length=5, arrangement="repeated")
    assert _token_weights(shared).tolist() == [1, 1, 1, 0, 0]
    assert _token_weights(repeated).tolist() == [0.5, 1, 0.5, 1, 0]
    assert _token_weights(join([repeated, shared])).tolist() == [0.5, 1, 0.5, 1, 0, 1, 1, 1, 0, 0]
    assert _token_weights(lay_out([], [], length=3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_layers_add_the_gradient_once(how, preferences, outer):
    packs = [lay_out([i], [preference], length=128) for i, preference in enumerate(preferences)]
    want = own_loss(balanced(family("mixtral")), packs, outer)
    policy = balanced(family("mixtral"))
    recompute(policy, how)
    got = own_loss(policy, packs, outer)
    assert got[0] == want[0]
    assert_same(got, want)


@pytest.mark.slow
def test_compiled_layers_add_the_same_gradient_without_graph_breaks(preferences, outer):
    """In bfloat16, because experts cannot be compiled in float32."""
    torch._dynamo.reset()
    packs = [lay_out([i], [preference], length=128) for i, preference in enumerate(preferences)]
    results = []
    for compiles in (False, True):
        policy = shard(balanced(family("qwen3_moe"), attention="sdpa"), join_process_group(), bfloat16=True)
        if compiles:
            for layer in decoder_layers(policy.model):
                layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
        with policy.computing():
            results.append(own_loss(policy, packs, outer))
    (plain, want), (compiled, got) = results
    assert compiled == pytest.approx(plain, rel=1e-3)
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() <= 0.02 * gradient.norm(), name
    torch._dynamo.reset()


# In a run


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balance")
    model = model_folder(folder / "model", "qwen3_moe", initializer_range=0.05)
    return [
        *(few_pairs(folder, 16), f"policy.model_name={model}", f"reference.cache_dir={folder}/cache"),
        *("dpo.max_num_steps=2", "checkpointing.enabled=false", f"dpo.router_aux_loss_coef={COEFFICIENT}"),
        *("policy.packing.pack_length=256", "policy.optimizer.kwargs.lr=1e-3"),
    ]


def test_a_run_reports_the_loss_of_the_global_batch_and_trains_with_it(settings, tmp_path):
    """The plain loop: one sequence at a time, transformers' function over the batch, torch's AdamW."""
    setup = set_up(load_config(None, [*SHORT, *settings]).config, CPU)
    run = short_run(tmp_path / "run", *settings)
    model, base = (plain_model(setup.source.folder) for _ in range(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98), eps=1e-5)
    lines = metrics_of(run)
    for batch, line in zip(setup.plan.batches.epoch(0), lines, strict=False):
        members = [setup.plan.train.store[int(index)] for index in batch.preferences]
        margins, logits, weights = [], [], []
        for preference in members:
            chosen, rejected = (one.sum() for one in plain_token_logps(model, preference))
            with torch.no_grad():
                ref_chosen, ref_rejected = (one.sum() for one in plain_token_logps(base, preference))
            margins.append((chosen - ref_chosen) - (rejected - ref_rejected))
            for completion in preference.completions:
                ids = torch.from_numpy(np.concatenate([preference.prompt, completion]).astype(np.int64))[None]
                logits.append(model(input_ids=ids, use_cache=False, output_router_logits=True).router_logits)
                weights += [0.5] * len(preference.prompt) + [1.0] * len(completion)
        by_layer = tuple(torch.cat(layers) for layers in zip(*logits, strict=True))
        balance = load_balancing_loss_func(by_layer, 4, 2, torch.tensor(weights)[None])
        loss = -F.logsigmoid(0.1 * torch.stack(margins)).mean() + COEFFICIENT * balance
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert line["router_aux_loss"] == pytest.approx(balance.item(), rel=1e-5)
        assert line["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert len(lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize("arrangement", ["policy.packing.share_prompts=false", "policy.packing.mode=none"])
def test_sharing_prompts_does_not_change_a_run(settings, tmp_path, arrangement):
    given = [one for one in settings if not (arrangement.endswith("none") and "pack_length" in one)]
    shared, other = (
        metrics_of(short_run(tmp_path / name, *own)) for name, own in (("a", settings), ("b", [*given, arrangement]))
    )
    for this, that in zip(shared, other, strict=True):
        for name in ("loss", "router_aux_loss", "grad_norm"):
            assert this[name] == pytest.approx(that[name], rel=1e-4), name


def test_without_the_key_nothing_is_reported(settings, tmp_path):
    (line,) = metrics_of(short_run(tmp_path / "run", *settings, "dpo.router_aux_loss_coef=0", "dpo.max_num_steps=1"))
    assert "router_aux_loss" not in line
