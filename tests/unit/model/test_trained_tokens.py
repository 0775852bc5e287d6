"""Tokens whose embeddings are trained alongside adapters: what is selected, what is refused, and what is counted."""

import json

import pytest
import torch
from adapters import trained_adapter
from models import MODEL, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn

from tandem.config.load import load_config
from tandem.config.sections.policy import Lora
from tandem.errors import ConfigError
from tandem.model.files.source import ModelSource, find_source
from tandem.model.lora import tokens
from tandem.model.lora.adapters import load_adapted, merge_adapters
from tandem.model.lora.fingerprints import start_fingerprint
from tandem.model.lora.layers import plan_lora
from tandem.model.lora.rows import add_rows, trained_rows
from tandem.model.lora.tokens import ids_of_tokens
from tandem.report.choices import describe_choices
from tandem.training.memory import estimate_memory
from tandem.training.start.setup import set_up

CPU = torch.device("cpu")
KEY = "policy.lora.trainable_token_indices"


@pytest.fixture(scope="module")
def source():
    """The embedded model, whose embeddings are tied: 128 wide, with 2,048 tokens."""
    return find_source("policy.model_name", "embedded", None)


@pytest.fixture(scope="module")
def small():
    """A model 32 wide, with tied embeddings."""
    return find_source("policy.model_name", str(MODEL), None)


def plan(source, ids=(), **settings):
    found = plan_lora(source, Lora(enabled=True, **settings), CPU, "float32", tuple(ids))
    assert found is not None
    return found


def refusal(source, ids=(), **settings):
    with pytest.raises(ConfigError) as refused:
        plan(source, ids, **settings)
    return str(refused.value)


def policy_with(*tokens):
    return load_config(
        None, ["policy.lora.enabled=true", f"{KEY}={json.dumps(tokens, ensure_ascii=False)}"]
    ).config.policy


# Tokens by id and by text


def test_tokens_are_named_by_id_or_as_in_the_vocabulary(source):
    assert ids_of_tokens(policy_with("<|im_end|>", 700, "<|im_start|>", "Ġit"), source) == (1, 2, 300, 700)
    assert ids_of_tokens(policy_with(), source) == ()


def test_ids_need_no_tokenizer(source, monkeypatch):
    monkeypatch.setattr(tokens, "load_tokenizer", None)
    assert ids_of_tokens(policy_with(7, 5), source) == (5, 7)


def test_unknown_tokens_are_refused_by_name(source):
    with pytest.raises(ConfigError) as refused:
        ids_of_tokens(policy_with(5, "<|think|>"), source)
    assert str(refused.value) == (
        f'{KEY}: "<|think|>" is not one token of the tokenizer of embedded. Give a token as its vocabulary has it, or an id.'
    )


def test_a_token_named_twice_is_refused(source):
    with pytest.raises(ConfigError) as refused:
        ids_of_tokens(policy_with(1, "<|im_start|>"), source)
    assert str(refused.value) == f'{KEY} names token 1 twice (1 and "<|im_start|>"). Leave one of them out.'


@pytest.mark.parametrize(("ids", "outside"), [([5, 2048, 2049], 2048), ([-1, 5], -1)])
def test_ids_outside_the_vocabulary_are_refused(source, ids, outside):
    assert refusal(source, ids) == (
        f"{KEY}: token {outside} is not in the vocabulary of embedded, whose ids are 0 to 2047. Leave it out."
    )


def test_the_padding_token_is_refused():
    """Its embedding is never trained: torch gives it no gradient."""
    padded = ModelSource("padded", MODEL, tiny_config("llama", vocab_size=2048, pad_token_id=3))
    assert refusal(padded, [3]) == (
        f"{KEY}: token 3 is the padding token of padded, whose embedding gets no gradient. Leave it out."
    )


def test_embeddings_that_compute_something_else_are_refused(source, monkeypatch):
    class Hashed(nn.Embedding):
        def forward(self, ids):
            return super().forward(ids // 2)

    model = tiny_model("llama")
    model.set_input_embeddings(Hashed(96, 32))
    monkeypatch.setattr("tandem.model.lora.layers.empty_model", lambda *_, **__: model)
    assert refusal(source, [5]) == (
        f"{KEY}: the embeddings of embedded are a Hashed, whose rows cannot be trained alone. Train them in full with "
        "policy.lora.modules_to_save."
    )


def test_embeddings_that_are_trained_in_full_are_refused(source):
    assert refusal(source, [5], modules_to_save=["embed_tokens", "lm_head"]) == (
        f"{KEY}: policy.lora.modules_to_save trains model.embed_tokens in full, with the embeddings of all tokens. Leave out "
        f"{KEY}."
    )
    untied = ModelSource("untied", MODEL, tiny_config("llama", tie_word_embeddings=False))
    found = plan(untied, [5], modules_to_save=["lm_head"])
    assert (found.tokens.ids, found.tokens.is_tied, found.saved.modules) == ((5,), False, ("lm_head",))


# What is trained


def test_trained_rows_are_counted_and_reported(source):
    plain, found = plan(source), plan(source, [1, 2])
    assert (found.num_trained, found.num_frozen) == (plain.num_trained + 2 * 128, plain.num_frozen)
    policy = policy_with(1, 2)
    before, after = (estimate_memory(source, policy, CPU, lora=one, precision="float32") for one in (plain, found))
    assert after.parts.gradients - before.parts.gradients == 4 * 2 * 128
    assert after.parts.states - before.parts.states == 8 * 2 * 128
    # A tied head keeps its input, and one number for each trained token.
    assert after.per_token - before.per_token == 4 * (128 + 2)
    reported = dict(
        describe_choices(set_up(load_config(None, ["policy.lora.enabled=true", f"{KEY}=[1,2]"]).config, CPU))
    )
    assert "embeddings of 2 tokens; 155,904 parameters trained, 1,049,728 frozen" in reported["adapters"]


def test_a_new_row_is_that_of_the_weight_and_only_these_rows_are_merged(small):
    policy = policy_with(7, 5)
    loaded = load_adapted(small, policy, CPU, plan(small, [5, 7])).model
    weight = load_file(MODEL / "model.safetensors")["model.embed_tokens.weight"]
    rows = loaded.model.embed_tokens.trained_rows
    assert torch.equal(rows, weight[[5, 7]])
    tensors = {**dict(loaded.named_parameters()), "model.embed_tokens.trained_rows": rows.detach() + 1}
    merged = merge_adapters(loaded, tensors)
    assert set(merged) == {name for name in load_file(MODEL / "model.safetensors") if name != "lm_head.weight"}
    changed = weight.clone()
    changed[[5, 7]] += 1
    assert torch.equal(merged["model.embed_tokens.weight"], changed)


def test_a_token_that_occurs_often_gets_an_exact_gradient():
    """300 times 1 + 1/128 in bfloat16, where a sum of 256 and 1 is 256."""
    embeddings = nn.Embedding(4, 2, dtype=torch.bfloat16).requires_grad_(False)
    model = nn.Module()
    model.get_input_embeddings = lambda: embeddings
    add_rows(model, (1, 3))
    embeddings.trained_rows.data = embeddings.trained_rows.data.bfloat16()
    out = embeddings(torch.tensor([[3] * 300 + [0, 1, 2]]))
    assert torch.equal(out[0, -1], embeddings.weight[2])
    (out.sum() * (1 + 2**-7)).backward()
    assert embeddings.trained_rows.grad.tolist() == [[1.0078125] * 2, [302.0] * 2]


def test_the_rows_are_written_before_each_computation(small):
    loaded = load_adapted(small, policy_with(5), CPU, plan(small, [5])).model
    rows = trained_rows(loaded)
    rows.rows.data += 1
    for _ in range(2):
        with rows.held(), rows.held():
            assert torch.equal(loaded.model.embed_tokens.weight[5], rows.rows[0])
        rows.rows.data += 1
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


# Starting from an adapter with such tokens


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return trained_adapter(MODEL, tmp_path_factory.mktemp("tokens") / "adapter", trainable_token_indices=[7, 5])


def copy_of(adapter, folder, change=lambda tensors: None, **described):
    folder.mkdir()
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **described}))
    return str(folder)


def test_the_rows_of_a_start_adapter_are_in_the_order_of_their_ids(small, adapter):
    found = plan(small, adapter=str(adapter))
    assert found.tokens.ids == (5, 7)
    assert plan(small, [5, 7], adapter=str(adapter)) == found
    name = "model.embed_tokens.token_adapter.trainable_tokens_delta"
    stored = load_file(adapter / "adapter_model.safetensors")[f"base_model.model.{name}"]
    assert torch.equal(found.start.weights()[name], stored[[1, 0]])


def test_the_tokens_of_an_adapter_are_part_of_what_it_computes(small, adapter, tmp_path):
    ids = ([7, 5], [7, 5], [7, 6])
    folders = [copy_of(adapter, tmp_path / str(i), trainable_token_indices=one) for i, one in enumerate(ids)]
    first, same, other = (start_fingerprint(small, plan(small, adapter=one)) for one in folders)
    assert first == same != other


def test_lists_by_layer_are_read_if_they_are_of_the_embeddings(small, adapter, tmp_path):
    by_layer = {"embed_tokens": [7, 5]}
    found = copy_of(adapter, tmp_path / "one", trainable_token_indices=by_layer)
    assert plan(small, adapter=found).tokens.ids == (5, 7)
    tied = copy_of(adapter, tmp_path / "tied", trainable_token_indices={**by_layer, "lm_head": [7, 5]})
    assert plan(small, adapter=tied).tokens.ids == (5, 7)
    other = copy_of(adapter, tmp_path / "other", trainable_token_indices={"wte": [7, 5]})
    assert refusal(small, adapter=other) == (
        f"policy.lora.adapter = {other}: trainable_token_indices in its adapter_config.json name wte, but only rows of "
        "model.embed_tokens can be trained. Merge the adapter with peft, and start from the result."
    )
    two = copy_of(adapter, tmp_path / "two", trainable_token_indices={**by_layer, "lm_head": [7]})
    assert refusal(small, adapter=two) == (
        f"policy.lora.adapter = {two}: trainable_token_indices in its adapter_config.json is not one list of different ids. "
        "Merge the adapter with peft, and start from the result."
    )


def test_the_configuration_must_name_the_tokens_of_the_adapter(small, adapter):
    assert refusal(small, [5], adapter=str(adapter)) == (
        f"policy.lora.adapter = {adapter}: its trainable_token_indices are 5, 7, but {KEY} selects others. Leave out {KEY}."
    )


def test_a_configuration_with_tokens_and_an_adapter_without_any_are_refused(small, tmp_path):
    plain = trained_adapter(MODEL, tmp_path / "plain")
    assert refusal(small, [5], adapter=str(plain)) == (
        f"policy.lora.adapter = {plain}: its trainable_token_indices are none, but {KEY} selects others. Leave out {KEY}."
    )


def test_rows_of_another_shape_are_refused(small, adapter, tmp_path):
    name = "model.embed_tokens.token_adapter.trainable_tokens_delta"
    wide = copy_of(
        adapter, tmp_path / "wide", lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(2, 64)})
    )
    assert refusal(small, adapter=wide) == (
        f"policy.lora.adapter = {wide}: made for a different model: the shape of {name} is [2, 64], but {small.name} needs "
        f"{name} with [2, 32]. Set policy.model_name to the adapter's base model."
    )


def test_rows_that_the_configuration_does_not_name_are_refused(small, adapter, tmp_path):
    none = copy_of(adapter, tmp_path / "none", trainable_token_indices=None)
    assert refusal(small, adapter=none) == (
        f"policy.lora.adapter = {none}: holds base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta, which is "
        "not a weight of a LoRA adapter. Save it again with peft."
    )
