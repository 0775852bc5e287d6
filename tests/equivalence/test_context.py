"""Ranks that divide every row among them compute the log-probabilities and gradients of one rank, for every kind of attention."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from killing import SERVER
from models import ARCHITECTURES, VOCABULARY, as_policy, random_preference, tiny_model

from tandem.data.text.tokens import TokenizedPreference
from tandem.model.distributed import context as context_module
from tandem.model.distributed.context import Context
from tandem.model.distributed.layers import compile_layers, recompute
from tandem.model.policy import Policy
from tandem.packing.layout import join, lay_out

CPU = torch.device("cpu")
LENGTH = 64
# name: (architecture, changes of its configuration, kind of attention)
CASES = {
    **{name: (name, {}, "trees") for name in ARCHITECTURES},
    "one key head": ("llama", {"num_key_value_heads": 1}, "trees"),
    "one key head and a window": ("mistral", {"num_key_value_heads": 1}, "trees"),
    "keys wider than values": ("deepseek_v3", {}, "trees"),
    "dense mask": ("llama", {}, "sdpa"),
    "flash kernels": ("mistral", {}, "varlen"),
    "8,192 tokens": ("llama", {"num_hidden_layers": 1, "max_position_embeddings": 8192}, "trees"),
}
MORE = {
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "head_dim": 4,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    }
}


def packs(*, arrangement="shared"):
    """Rows whose prompts and completions end on both ranks' columns, and a row of filler."""
    rng = np.random.default_rng(3)
    some = [random_preference(rng, num_completions=n) for n in (2, 3, 2)]
    rows = [lay_out([i], [one], length=LENGTH, arrangement=arrangement) for i, one in enumerate(some)]
    if arrangement == "repeated":
        return [join(rows[:2]), rows[2]]
    two = lay_out([3, 4], [random_preference(rng), random_preference(rng)], length=LENGTH)
    one_token = replace(random_preference(rng), completions=(np.array([5], np.int32), np.array([7], np.int32)))
    return [
        join(rows[:2]),
        join([rows[2], two]),
        lay_out([5], [one_token], length=LENGTH),
        lay_out([], [], length=LENGTH),
    ]


def long_pack():
    """A preference that fills a row of 8,192 tokens."""
    rng = np.random.default_rng(4)
    ids = [rng.integers(3, VOCABULARY, count).astype(np.int32) for count in (8000, 100, 92)]
    return lay_out([0], [TokenizedPreference(ids[0], (ids[1], ids[2]), ((0, 1),), "test:1")], length=8192)


def values_and_gradients(policy, given):
    values, generator = [], torch.Generator().manual_seed(1)
    for pack in given:
        inputs = policy.inputs(pack, CPU)
        out = policy(inputs)[: inputs.num_scored]
        # the factors that a loss would give each token; padding gets no gradient
        (out * torch.randn(len(out), generator=generator)).sum().backward()
        values.append(out.detach())
    return torch.cat(values), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def differences(case, context, *, change=lambda policy: None):
    """The largest difference of log-probabilities, and the largest relative difference of gradients."""
    architecture, changes, attention = CASES[case]
    given = packs(arrangement="repeated" if attention == "varlen" else "shared")
    given = [long_pack()] if case == "8,192 tokens" else given

    def made():
        model = tiny_model(architecture, **{**MORE.get(architecture, {}), **changes})
        return as_policy(model, head_chunk=16, attention=attention)

    want, expected = values_and_gradients(made(), given)
    policy = made()
    policy.context = context
    change(policy)
    got, gradients = values_and_gradients(policy, given)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    gradients = {name.replace("_orig_mod.", ""): gradient for name, gradient in gradients.items()}
    assert gradients.keys() == expected.keys()
    errors = (float((gradients[name] - one).norm() / one.norm()) for name, one in expected.items() if one.norm() > 0)
    return float((got - want).abs().max()), max(errors)


def _adding_up_gradients(ctx, grad):
    grad = grad.clone()
    dist.all_reduce(grad)
    (places,) = ctx.saved_tensors
    return torch.nn.functional.pad(grad[..., places], (0, ctx.num_own - len(places))), None, None, None


def _counting_columns(self, pack, device):
    """The inputs of a rank, with the positions of its own columns counted from 0."""
    inputs = _inputs(self, pack, device)
    if self.context is None:
        return inputs
    return replace(inputs, position_ids=torch.arange(inputs.token_ids.shape[1]).expand_as(inputs.token_ids))


_inputs = Policy.inputs


def _slices(self, rows):
    return np.split(rows, self.size, axis=1)[self.number].copy()


# What would be wrong: name -> (object, attribute, what replaces it).
WRONG = {
    "gradients added up twice": (context_module._Gathered, "backward", staticmethod(_adding_up_gradients)),
    "positions counted again": (Policy, "inputs", _counting_columns),
    "slices instead of stripes": (Context, "own_columns", _slices),
    "heads of another rank": (
        Context,
        "own_heads",
        lambda self, per_head: per_head.flip(0)[: len(per_head) // self.size],
    ),
}


def _rank(number, count, path, answers, with_compiled):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, count), rank=number, world_size=count)
    context = Context(dist.group.WORLD.group_name, number, count)
    found = {case: differences(case, context) for case in CASES}
    found["recomputed"] = differences("llama", context, change=lambda policy: recompute(policy, "full"))
    for name, (where, attribute, wrong) in WRONG.items():
        right = where.__dict__[attribute]
        setattr(where, attribute, wrong)
        found[name] = differences("gpt_oss" if "heads" in name else "llama", context)
        setattr(where, attribute, right)
    if with_compiled:
        found["compiled"] = differences("dense mask", context, change=compile_layers)
        found["compiled and recomputed"] = differences(
            "dense mask", context, change=lambda policy: (recompute(policy, "selective"), compile_layers(policy))
        )
    answers.put((number, found))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request, tmp_path_factory):
    """What every rank found, by the name of the case. On four ranks, layers are also compiled."""
    count, answers = request.param, SERVER.SimpleQueue()
    path = str(tmp_path_factory.mktemp("context") / "store")
    given = (count, path, answers, count == 4)
    processes.start_processes(_rank, given, nprocs=count, start_method=SERVER.get_start_method())
    return dict(answers.get() for _ in range(count))


@pytest.mark.parametrize("case", [*CASES, "recomputed"])
def test_divided_rows_give_the_log_probabilities_and_gradients_of_whole_rows(found, case):
    for of_rank in found.values():
        values, gradients = of_rank[case]
        assert values < 2e-5
        assert gradients < 2e-5


@pytest.mark.parametrize("case", ["compiled", "compiled and recomputed"])
@pytest.mark.slow
def test_compiled_layers_divide_rows_too(found, case):
    if case not in found[0]:
        pytest.skip("compiled on four ranks only")
    for of_rank in found.values():
        values, gradients = of_rank[case]
        assert values < 1e-4
        assert gradients < 1e-4


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_would_be_found(found, name):
    assert any(max(of_rank[name]) > 1e-2 for of_rank in found.values())
