"""The audit stops a run before its first update when what is trained is not what the plain model computes."""

import json
import re

import numpy as np
import pytest
import torch
from models import tiny_model
from running import SHORT, few_pairs, short_run

from tandem.config.load import load_config
from tandem.errors import AuditError
from tandem.model import attention, audit, policy, reference
from tandem.model.audit import start_loss_verdict
from tandem.model.workers import start_workers
from tandem.train.setup import set_up


def assert_nothing_was_trained(run):
    assert (run / "metrics.jsonl").exists() is False


def test_a_wrong_attention_rule_is_caught(tmp_path, monkeypatch):
    def leaking(until, position, q, k, window):
        return (k <= q) & (q < until[k] + 9)  # a completion sees the end of the one before it

    monkeypatch.setattr(attention, "may_attend", leaking)
    # Both sides share the error, so policy and reference agree; only the plain forward tells.
    with pytest.raises(AuditError, match=r"audit: .*few.jsonl:\d+ \(completion 1\): packed log-probabilities differ"):
        short_run(tmp_path / "run", f"reference.cache_dir={tmp_path}/cache", few_pairs(tmp_path))
    assert_nothing_was_trained(tmp_path / "run")


def test_a_shifted_gather_is_caught(tmp_path, monkeypatch):
    inputs = policy.Policy.inputs

    def shifted(self, pack, device):
        import dataclasses

        return inputs(self, dataclasses.replace(pack, predicting=pack.predicting + 1), device)

    monkeypatch.setattr(policy.Policy, "inputs", shifted)
    with pytest.raises(AuditError, match="packed log-probabilities differ from the model's plain forward"):
        short_run(tmp_path / "run", f"reference.cache_dir={tmp_path}/cache", few_pairs(tmp_path))
    assert_nothing_was_trained(tmp_path / "run")


def test_a_reference_with_other_numbers_is_caught(tmp_path, monkeypatch):
    of_preference = reference.CachedReference.of_preference
    monkeypatch.setattr(reference.CachedReference, "of_preference", lambda self, i: of_preference(self, i) + 0.01)
    with pytest.raises(AuditError) as caught:
        short_run(tmp_path / "run")
    assert re.fullmatch(
        r"audit: .*train\.jsonl:\d+ \(completion 0\): the reference differs from the model it was made of by 0\.01 nats a "
        r"token \(rounding explains 0\.0001\)\. Nothing was trained\. Remove the cached reference "
        r"\(reference\.cache_dir\) and start again\.",
        str(caught.value),
    )
    assert_nothing_was_trained(tmp_path / "run")


def test_a_damaged_cache_file_is_put_aside_and_computed_anew(tmp_path):
    cache = tmp_path / "cache"
    given = f"reference.cache_dir={cache}", few_pairs(tmp_path)
    short_run(tmp_path / "one", *given)
    files = sorted(cache.glob("*/logps.f32"))
    whole = [file.read_bytes() for file in files]
    for file in files:
        content = bytearray(file.read_bytes())
        content[1] ^= 0xFF
        file.write_bytes(content)
    short_run(tmp_path / "two", *given)
    assert [file.read_bytes() for file in files] == whole
    assert len(list(cache.glob("*.damaged"))) == len(files)


def test_a_model_that_never_asks_for_the_mask_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "counted_calls", lambda: _Nothing())
    with pytest.raises(AuditError, match="0 of 2 attention layers asked for the pack's mask"):
        short_run(tmp_path / "run")


class _Nothing:
    def __enter__(self):
        return []

    def __exit__(self, *_):
        return None


def test_the_sample_holds_the_longest_preference():
    store = set_up(load_config(None, SHORT).config, torch.device("cpu")).train.store
    sample = audit._sample(store)
    assert sample.tolist()[:3] == [0, 1, 2]
    assert store.longest[sample].max() == store.longest.max()


@pytest.mark.parametrize(
    ("nats", "words"),
    [
        (1.6, "1.60 nats a token"),
        (4.9, "4.90 nats a token: implausible; is this the template it was trained with?"),
        (10.4, "10.40 nats a token, as much as guessing (10.37): these weights are untrained"),
    ],
)
def test_the_start_loss_is_put_into_words(nats, words):
    assert start_loss_verdict(nats, 32_000) == words


def test_the_reference_pass_can_be_ended_behind_any_pack(tmp_path):
    from tandem.model.load import load_policy
    from tandem.model.parallel import shard

    class Ended(Exception):
        pass

    def end_behind_the_second(count):
        told.append(count)
        if len(told) == 2:
            raise Ended

    told, workers = [], start_workers()
    setup = set_up(load_config(None, SHORT).config, workers.device)
    frozen = shard(load_policy(setup.source, setup.config.policy, workers.device), workers, bfloat16=False)
    given = {"folder": tmp_path, "weights": "w", "precision": "float32", "progress": end_behind_the_second}
    with pytest.raises(Ended):
        reference.cached_reference(lambda: frozen, setup.train, workers, **given)
    assert told == [0, 0]
    assert not list(tmp_path.iterdir())


def test_cached_reference_equals_the_live_one(tmp_path):
    """In numbers, not only in what is learned: every token of every preference."""
    from tandem.model.load import load_policy
    from tandem.model.parallel import shard

    workers = start_workers()
    setup = set_up(load_config(None, SHORT).config, workers.device)
    frozen = shard(load_policy(setup.source, setup.config.policy, workers.device), workers, bfloat16=False)
    cached = reference.cached_reference(
        lambda: frozen,
        setup.train,
        workers,
        folder=tmp_path,
        weights="w",
        precision="float32",
        progress=lambda n: None,
    )
    live = reference.LiveReference(frozen)
    for pack in setup.train.micro_batches(np.array([5, 2, 300, 17])):  # other neighbours than in the cached pass
        inputs = frozen.inputs(pack, workers.device)
        torch.testing.assert_close(
            cached.token_logps(pack, inputs)[: inputs.num_scored],
            live.token_logps(pack, inputs)[: inputs.num_scored],
            atol=2e-5,
            rtol=0,
        )


def test_a_model_that_rounds_more_is_allowed_more(monkeypatch):
    """A plain forward that differs from itself by 0.02, rounded otherwise, explains 0.08 to a pack; less explains 0.01."""

    def found(plain, rounding):
        one = audit._Compared(
            "here", plain=plain, reference=0.0, rounding=lambda: rounding, nats=8.0, num_tokens=4, is_best=True
        )
        monkeypatch.setattr(audit, "_compare", lambda *_: [one])
        monkeypatch.setattr(audit, "_check_calls", lambda *_: None)
        monkeypatch.setattr(audit, "_sample", lambda store: store)
        return audit.audit(None, None, OnePack(), start_workers(), precision="bfloat16", same_start=True)

    class OnePack:
        store = None

        def alone(self):
            return self

        def micro_batches(self, _):
            return [None]

    assert found(0.079, 0.02).plain_difference == 0.079
    assert found(0.009, 0.0001).chosen_nats == 2.0
    with pytest.raises(AuditError, match=r"by 0\.081 nats a token \(rounding explains 0\.08\)"):
        found(0.081, 0.02)
    with pytest.raises(AuditError, match=r"by 0\.011 nats a token \(rounding explains 0\.01\)"):
        found(0.011, 0.0001)


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 1e-9, 1e-5), (torch.bfloat16, 1e-4, 0.1)])
@pytest.mark.bfloat16
def test_a_nudge_shows_how_much_a_model_makes_of_one_rounding(dtype, least, most):
    made = policy.Policy(tiny_model("llama").to(dtype), packed=True, attention="sdpa", head_chunk=64)
    ids = torch.arange(10, 40), torch.arange(40, 60)
    with torch.no_grad():
        plain, nudged, again = (made.plain_logps(*ids, nudged=flag) for flag in (False, True, True))
    assert torch.equal(nudged, again)
    assert least < (plain - nudged).abs().mean().item() < most
    assert not made.model.get_input_embeddings()._forward_hooks


def test_the_first_validation_finds_policy_and_reference_alike_to_the_bit(tmp_path):
    given = ["dpo.val_at_start=true", "dpo.val_global_batch_size=12", f"reference.cache_dir={tmp_path}/reference"]
    train, held_out = few_pairs(tmp_path), few_pairs(tmp_path / "held-out", 30).replace("train", "validation", 1)
    run = short_run(tmp_path / "run", *given, "dpo.max_num_steps=1", train, held_out)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["split"] == "validation-default"
    assert first["rewards_margin_p10"] == first["rewards_margin_p90"] == 0
