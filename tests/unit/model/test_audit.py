"""The audit stops a run before its first update if packs do not compute what the plain model computes."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from models import as_policy, model_folder, random_preference, tiny_model
from running import SHORT, few_pairs, killed_after, metrics_of, short_run
from transformers import AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.data.text.tokens import TokenizedPreference
from tandem.errors import AuditError, DefectError, NonFiniteError
from tandem.model import policy, reference
from tandem.model.attention import pack_attention as attention
from tandem.model.checks import audit
from tandem.model.checks.audit import start_loss_verdict
from tandem.model.distributed.process_group import join_process_group
from tandem.model.files.tiny import tiny_model as tiny_folder
from tandem.packing.layout import lay_out
from tandem.report.reporter import Reporter
from tandem.training.start.setup import set_up
from tandem.training.trainer import train


def assert_nothing_was_trained(run):
    assert (run / "metrics.jsonl").exists() is False


def test_a_wrong_attention_rule_is_caught(tmp_path, monkeypatch):
    def leaking(until, position, q, k, window):
        return (k <= q) & (q < until[k] + 9)  # a completion sees the end of the one before it

    monkeypatch.setattr(attention, "may_attend", leaking)
    # Policy and reference share the error, so they agree; only the plain forward differs.
    with pytest.raises(AuditError) as caught:
        short_run(tmp_path / "run", f"reference.cache_dir={tmp_path}/cache", few_pairs(tmp_path))
    assert re.fullmatch(
        r"audit: policy\.model_name = .*: .*few\.jsonl:\d+ \(completion 1\): packed log-probabilities differ from the model's "
        r"plain forward by [\d.e-]+ nats a token \(rounding explains 0\.0001\), so losses would be wrong\. Nothing was "
        r"trained\. Train this model with policy\.packing\.mode=none, and report it\.",
        str(caught.value),
    )
    assert_nothing_was_trained(tmp_path / "run")
    assert not list((tmp_path / "cache").glob("*")), "a refused run caches nothing"


def test_the_refusal_of_an_unpacked_run_does_not_advise_to_unpack(tmp_path, monkeypatch):
    inputs = policy.Policy.inputs

    def shifted(self, pack, device):
        import dataclasses

        return inputs(self, dataclasses.replace(pack, predicting=pack.predicting + 1), device)

    monkeypatch.setattr(policy.Policy, "inputs", shifted)
    with pytest.raises(AuditError) as caught:
        short_run(tmp_path / "run", "policy.packing.mode=none", few_pairs(tmp_path))
    assert "padded log-probabilities differ" in str(caught.value)
    assert str(caught.value).endswith(
        "Nothing was trained. tandem cannot train this model correctly: please report it."
    )


def test_a_shifted_gather_is_caught(tmp_path, monkeypatch):
    inputs = policy.Policy.inputs

    def shifted(self, pack, device):
        import dataclasses

        return inputs(self, dataclasses.replace(pack, predicting=pack.predicting + 1), device)

    monkeypatch.setattr(policy.Policy, "inputs", shifted)
    with pytest.raises(AuditError, match="packed log-probabilities differ from the model's plain forward"):
        short_run(tmp_path / "run", f"reference.cache_dir={tmp_path}/cache", few_pairs(tmp_path))
    assert_nothing_was_trained(tmp_path / "run")


def test_a_reference_that_differs_from_the_policy_is_caught(tmp_path, monkeypatch):
    of_preference = reference.CachedReference.of_preference
    monkeypatch.setattr(reference.CachedReference, "of_preference", lambda self, i: of_preference(self, i) + 0.01)
    with pytest.raises(AuditError) as caught:
        short_run(tmp_path / "run")
    assert re.fullmatch(
        r"audit: .*train\.jsonl:\d+ \(completion 0\): the reference differs from the model it was computed with by 0\.01 nats a "
        r"token \(rounding explains 0\.0001\)\. Nothing was trained\. Remove the cached reference "
        r"\(reference\.cache_dir\) and start again\.",
        str(caught.value),
    )
    assert_nothing_was_trained(tmp_path / "run")


def test_a_damaged_cache_file_is_moved_aside_and_computed_again(tmp_path):
    cache = tmp_path / "cache"
    given = f"reference.cache_dir={cache}", few_pairs(tmp_path)
    short_run(tmp_path / "one", *given)
    files = sorted(cache.glob("*/logps.f32"))
    intact = [file.read_bytes() for file in files]
    for file in files:
        content = bytearray(file.read_bytes())
        content[1] ^= 0xFF
        file.write_bytes(content)
    short_run(tmp_path / "two", *given)
    assert [file.read_bytes() for file in files] == intact
    assert len(list(cache.glob("*.damaged"))) == len(files)


def test_a_model_that_never_uses_the_packs_mask_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "record_calls", lambda: _NoCalls())
    with pytest.raises(AuditError, match="only 0 of 2 attention layers use the pack's mask"):
        short_run(tmp_path / "run")


class _NoCalls:
    def __enter__(self):
        return []

    def __exit__(self, *_):
        return None


def test_the_sample_holds_the_longest_preference():
    store = set_up(load_config(None, SHORT).config, torch.device("cpu")).plan.train.store
    sample = audit._sample(store, 512)
    assert sample.tolist()[:3] == [0, 1, 2]
    assert store.longest[sample].max() == store.longest.max()


@pytest.mark.parametrize(
    ("nats", "words"),
    [
        (1.6, "1.60 nats a token"),
        (4.9, "4.90 nats a token: implausibly high; is this the template the model was trained with?"),
        (10.4, "10.40 nats a token, as much as guessing (10.37): these weights are untrained"),
    ],
)
def test_the_verdict_on_the_start_loss(nats, words):
    assert start_loss_verdict(nats, 32_000) == words


def test_the_reference_pass_can_be_stopped_after_any_pack(tmp_path):
    from tandem.model.distributed.layers import shard
    from tandem.model.load import load_policy

    class Stop(Exception):
        pass

    def stop_after_the_second(count):
        counts.append(count)
        if len(counts) == 2:
            raise Stop

    counts, ranks = [], join_process_group()
    setup = set_up(load_config(None, SHORT).config, ranks.device)
    frozen = shard(load_policy(setup.source, setup.config.policy, ranks.device), ranks, bfloat16=False)
    given = {"place": tmp_path / "reference", "progress": stop_after_the_second}
    with pytest.raises(Stop):
        reference.cached_reference(lambda: frozen, setup.plan.train, ranks, **given)
    assert counts == [0, 0]
    assert not list(tmp_path.iterdir())


def test_the_cached_reference_equals_the_live_one_for_every_token(tmp_path):
    from tandem.model.distributed.layers import shard
    from tandem.model.load import load_policy

    ranks = join_process_group()
    setup = set_up(load_config(None, SHORT).config, ranks.device)
    frozen = shard(load_policy(setup.source, setup.config.policy, ranks.device), ranks, bfloat16=False)
    cached = reference.cached_reference(
        lambda: frozen,
        setup.plan.train,
        ranks,
        place=tmp_path / "reference",
        progress=lambda n: None,
    )
    live = reference.LiveReference(frozen)
    for pack in setup.plan.train.micro_batches(
        np.array([5, 2, 300, 17])
    ):  # packed with other preferences than in the cached pass
        inputs = frozen.inputs(pack, ranks.device)
        torch.testing.assert_close(
            cached.token_logps(pack, inputs)[: inputs.num_scored],
            live.token_logps(pack, inputs)[: inputs.num_scored],
            atol=2e-5,
            rtol=0,
        )


def test_a_live_reference_that_is_a_different_model_uses_its_own_windows():
    rng, device = np.random.default_rng(0), torch.device("cpu")
    pack = lay_out([0], [random_preference(rng, max_prompt=40, max_completion=30)], length=128)
    other = as_policy(tiny_model("mistral"))
    with torch.no_grad():
        want = other(other.inputs(pack, device))
    live = reference.LiveReference(other)
    for architecture in ("llama", "mistral"):
        inputs = as_policy(tiny_model(architecture, seed=1)).inputs(pack, device)
        assert torch.equal(live.token_logps(pack, inputs), want)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.bfloat16)])
def test_weights_that_are_not_finite_are_refused(tmp_path, precision):
    """NaN as a GPU writes it, with all bits set, must not become zero in bfloat16."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder())
    model.model.layers[0].mlp.up_proj.weight.data[0].view(torch.int32).fill_(0x7FFFFFFF)
    folder = shutil.copytree(tiny_folder(), tmp_path / "model")
    model.save_pretrained(folder)
    with pytest.raises(AuditError) as caught:
        short_run(tmp_path / "run", f"policy.model_name={folder}", f"policy.precision={precision}", few_pairs(tmp_path))
    assert str(caught.value) == (
        f"audit: policy.model_name = {folder}: {tmp_path}/few.jsonl:5 (completion 0): its log-probabilities are not finite, so "
        "no loss can be computed. Nothing was trained. Try policy.precision=float32, in case the model overflows; or "
        "download it again, in case it is damaged."
    )
    assert_nothing_was_trained(tmp_path / "run")


@pytest.mark.parametrize(
    ("plain", "rounding", "tolerance"),
    [(0.079, 0.02, None), (0.009, 0.0001, None), (0.081, 0.02, "0.08"), (0.011, 0.0001, "0.01"), (0.32, 5.0, "0.25")],
)
def test_the_tolerance_grows_with_the_measured_rounding_up_to_a_maximum(monkeypatch, plain, rounding, tolerance):
    """A plain forward with a rounding error of 0.02 explains a difference of 0.08 in a pack; a smaller error explains 0.01.

    An error of 5 means that filler changes what the model computes, and explains at most 0.25.
    """
    one = audit.AuditedCompletion(
        place="here",
        packed=torch.full((4,), -2.0),
        plain_difference=plain,
        rounding=lambda: rounding,
        is_best=True,
    )
    monkeypatch.setattr(audit, "_compare", lambda *_: [one])
    monkeypatch.setattr(audit, "_check_calls", lambda *_: None)
    monkeypatch.setattr(audit, "_check_last_columns", lambda *_, **__: None)
    monkeypatch.setattr(audit, "_longest_that_fits", lambda *_: 100)

    class Store:
        longest = np.array([10, 20, 500])

        def __getitem__(self, index):
            half = np.zeros(self.longest[index] // 2, np.int32)
            return TokenizedPreference(half, (half, half), ((0, 1),), "here")

    class OnePack:
        store = Store()

        def for_single_rank(self):
            return self

        def micro_batches(self, _):
            return [None]

    class Packed:
        packed = True
        recurrent = None

    def found():
        return audit.audit(
            Packed(), OnePack(), join_process_group(), precision="bfloat16", model="policy.model_name = it"
        )

    if tolerance is None:
        audited = found()
        assert (audited.plain_difference, audited.chosen_nats) == (plain, 2.0)
        assert (audited.longest, audited.num_longer) == (20, 1)
        return
    with pytest.raises(AuditError, match=rf"by {plain} nats a token \(rounding explains {tolerance}\)"):
        found()


@pytest.mark.parametrize(("dtype", "minimum", "maximum"), [(torch.float32, 1e-9, 1e-5), (torch.bfloat16, 1e-4, 0.1)])
@pytest.mark.bfloat16
def test_perturbed_embeddings_change_the_plain_forward_by_about_the_rounding_error(dtype, minimum, maximum):
    made = as_policy(tiny_model("llama").to(dtype), attention="sdpa", head_chunk=64)
    ids = torch.arange(10, 40), torch.arange(40, 60)
    with torch.no_grad():
        plain, perturbed, again = (made.plain_logps(*ids, perturbed=flag) for flag in (False, True, True))
    assert torch.equal(perturbed, again)
    assert minimum < (plain - perturbed).abs().mean().item() < maximum
    assert not made.model.get_input_embeddings()._forward_hooks


def test_in_the_first_validation_policy_and_reference_agree_bit_for_bit(tmp_path):
    given = ["dpo.val_at_start=true", "dpo.val_global_batch_size=12", f"reference.cache_dir={tmp_path}/reference"]
    train, held_out = few_pairs(tmp_path), few_pairs(tmp_path / "held-out", 30).replace("train", "validation", 1)
    run = short_run(tmp_path / "run", *given, "dpo.max_num_steps=1", train, held_out)
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    assert first["split"] == "validation-default"
    assert first["rewards_margin_p10"] == first["rewards_margin_p90"] == 0


def test_preferences_are_audited_up_to_the_length_whose_eager_forward_fits_in_memory(monkeypatch):
    made = as_policy(tiny_model("llama"), head_chunk=64)
    cpu = torch.device("cpu")
    monkeypatch.setattr(audit, "_free_memory", lambda _: 2**40)
    assert audit._longest_that_fits(made, cpu) == 16_384
    # 4 heads x (2 x 4 + 4) bytes x n^2 + 96 words x (4 + 8) bytes x n = half of what is free: n = 1000
    monkeypatch.setattr(audit, "_free_memory", lambda _: 2 * (4 * 12 * 1000**2 + 96 * 12 * 1000))
    assert audit._longest_that_fits(made, cpu) == 1000


def test_memory_that_caches_files_counts_as_free(monkeypatch, tmp_path):
    cpu, given = torch.device("cpu"), tmp_path / "meminfo"
    given.write_text("MemTotal:       4000 kB\nMemFree:         100 kB\nMemAvailable:   3000 kB\n")
    monkeypatch.setattr(audit, "MEMINFO", given)
    assert audit._free_memory(cpu) == 3000 * 1024
    # a Mac has neither this file nor a count of free pages
    monkeypatch.setattr(audit, "MEMINFO", tmp_path / "nothing")
    monkeypatch.setattr(audit.os, "sysconf", {"SC_PHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert audit._free_memory(cpu) == 7 * 4096


def test_preferences_too_long_to_audit_are_reported(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(audit, "MAX_AUDIT_TOKENS", 80)
    loaded = load_config(None, [*SHORT, f"run.dir={tmp_path}/run", few_pairs(tmp_path), "dpo.max_num_steps=1"])
    train(loaded, Reporter("normal"))
    printed = capsys.readouterr().out
    assert re.search(r"^Audit: \d+ completions of up to \d\d tokens, packed = plain forward to", printed, re.M)
    assert re.search(
        r"^  not audited: \d+ longer preferences, whose eager forward may not fit in memory$", printed, re.M
    )


def leaking_reference(monkeypatch, folder):
    """A reference that is a different model, whose packed sequences leak into each other, while the policy's do not."""
    model_folder(folder, "llama", num_hidden_layers=1, initializer_range=0.05)
    forward = policy.Policy._trunk

    def leaking(self, inputs, mode):
        hidden = forward(self, inputs, mode)
        is_reference = self.packed and self.model.config.num_hidden_layers == 1
        return hidden + 0.1 * hidden.roll(1, dims=1) if is_reference else hidden

    monkeypatch.setattr(policy.Policy, "_trunk", leaking)
    return f"reference.model={folder}"


@pytest.mark.parametrize("mode", ["cached", "live"])
def test_a_reference_that_is_a_different_model_is_audited_before_its_pass(tmp_path, monkeypatch, mode):
    other, few = leaking_reference(monkeypatch, tmp_path / "other"), few_pairs(tmp_path)
    given = [other, few, f"reference.mode={mode}", f"reference.cache_dir={tmp_path}/cache"]
    with pytest.raises(AuditError, match=r"audit: reference\.model = .*other: .*: packed log-probabilities differ"):
        short_run(tmp_path / "run", *given)
    assert_nothing_was_trained(tmp_path / "run")
    assert not list((tmp_path / "cache").glob("*")), "a refused run caches nothing"
    # The advice in the refusal works.
    run = short_run(tmp_path / "unpacked", *given, "policy.packing.mode=none")
    assert metrics_of(run)[0]["loss"] > 0


def test_a_cached_reference_is_not_shared_by_runs_that_would_compute_other_numbers(tmp_path):
    few, cache = few_pairs(tmp_path), tmp_path / "cache"
    packings = [
        [],
        ["policy.packing.share_prompts=false"],
        ["policy.packing.mode=none"],
        ["policy.packing.pack_length=1024"],
    ]
    counts = []
    for number, packing in enumerate(packings):
        short_run(tmp_path / str(number), few, f"reference.cache_dir={cache}", "dpo.max_num_steps=1", *packing)
        counts.append(len(list(cache.glob("*/logps.f32"))))
    each = counts[0]
    assert counts == [each, 2 * each, 3 * each, 3 * each], "the row length makes no difference"


def test_a_resumed_run_keeps_the_reference_it_started_with(tmp_path, monkeypatch, capsys):
    import transformers

    few, cache = few_pairs(tmp_path), tmp_path / "cache"
    given = [few, f"reference.cache_dir={cache}", "checkpointing.save_period=2"]
    with killed_after(3):
        short_run(tmp_path / "run", *given)
    started = sorted(cache.iterdir())
    monkeypatch.setattr(transformers, "__version__", "99.0")
    short_run(tmp_path / "run", *given)
    assert sorted(cache.iterdir()) == started
    short_run(tmp_path / "new", *given)
    assert len(list(cache.iterdir())) == 2 * len(started)


@pytest.mark.parametrize("written", ["{}", "[1]", "[" * 100_000, '{"train": 7}', "PATH"])
@pytest.mark.slow
def test_a_list_of_references_that_tandem_did_not_write_is_ignored(tmp_path, written):
    """PATH: a folder outside the cache. If it were used, it would be renamed as a damaged reference."""
    cache, victim = tmp_path / "cache", tmp_path / "victim"
    given = [few_pairs(tmp_path), f"reference.cache_dir={cache}", "checkpointing.save_period=2"]
    with killed_after(3):
        short_run(tmp_path / "run", *given)
    victim.mkdir()
    (victim / "mine.txt").write_text("mine")
    before = json.loads((tmp_path / "run/references.json").read_text())
    path = json.dumps({name: f"{folder}/../../victim" for name, folder in before.items()})
    (tmp_path / "run/references.json").write_text(written.replace("PATH", path))
    started = sorted(cache.iterdir())
    short_run(tmp_path / "run", *given)
    assert (victim / "mine.txt").read_text() == "mine"
    assert sorted(cache.iterdir()) == started
    assert json.loads((tmp_path / "run/references.json").read_text()) == before


def test_a_resumed_run_whose_reference_is_gone_reports_that_it_is_computed_again(tmp_path, monkeypatch, capsys):
    import shutil

    import transformers

    given = [few_pairs(tmp_path), f"reference.cache_dir={tmp_path}/cache", "checkpointing.save_period=2"]
    with killed_after(3):
        short_run(tmp_path / "run", *given)
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(transformers, "__version__", "99.0")
    train(load_config(None, [*SHORT, f"run.dir={tmp_path}/run", *given]), Reporter("normal"))
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"the reference that {tmp_path}/run started with (train) is no longer in {tmp_path}/cache: it is recomputed with "
        "transformers 99.0, and may differ by rounding."
    ) in printed


@pytest.mark.slow
def test_a_damaged_reference_of_a_resumed_run_is_computed_again_under_another_name(tmp_path, monkeypatch):
    import transformers

    cache = tmp_path / "cache"
    given = [few_pairs(tmp_path), f"reference.cache_dir={cache}", "checkpointing.save_period=2"]
    with killed_after(3):
        short_run(tmp_path / "run", *given)
    started = {place.name for place in cache.iterdir()}
    for name in started:
        (cache / name / "logps.f32").write_bytes(b"damaged")
    monkeypatch.setattr(transformers, "__version__", "99.0")
    short_run(tmp_path / "run", *given)
    intact = {place.name for place in cache.iterdir() if place.suffix != ".damaged"}
    assert len(intact) == len(started)
    assert not intact & started


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_reference_values_that_are_not_finite_are_refused_with_their_row_and_not_cached(tmp_path, monkeypatch, value):
    few = few_pairs(tmp_path)
    start_portion = reference._start_portion

    def broken(policy, packer, device, indices, *, after_each):
        pending = start_portion(policy, packer, device, indices, after_each=after_each)
        read = type(pending).read

        class Broken:
            def __init__(self):
                self.indices = pending.indices

            def read(self, store):
                return [
                    (index, np.full_like(part, value) if index == 7 else part) for index, part in read(pending, store)
                ]

        return Broken()

    monkeypatch.setattr(reference, "_start_portion", broken)
    with pytest.raises(NonFiniteError) as caught:
        short_run(tmp_path / "run", few, f"reference.cache_dir={tmp_path}/cache")
    assert str(caught.value) == (
        f"{tmp_path}/few.jsonl:8: the reference's log-probabilities of this preference are not finite, so no loss can be "
        "computed. Nothing was cached or trained. Check this row; if other rows fail too, the reference model itself overflows: "
        "try policy.precision=float32."
    )
    assert not list((tmp_path / "cache").glob("*"))


def test_a_preference_whose_reference_no_rank_computed_stops_the_run(tmp_path, monkeypatch):
    read = reference._PendingPortion.read
    monkeypatch.setattr(reference._PendingPortion, "read", lambda self, store: read(self, store)[1:])
    with pytest.raises(DefectError, match=r"the reference was computed for 39 preferences instead of 40\."):
        short_run(tmp_path / "run", few_pairs(tmp_path), f"reference.cache_dir={tmp_path}/cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_a_model_that_depends_on_columns_far_along_a_row_is_refused(tmp_path):
    # Llama 4 scales attention by column, in steps of floor_scale columns. The audited sample is shorter, rows are longer.
    folder = model_folder(
        tmp_path / "model",
        "llama4_text",
        floor_scale=1536,
        attn_scale=2.0,
        no_rope_layers=[1, 0],
        num_local_experts=2,
        intermediate_size_mlp=48,
        initializer_range=0.3,
        max_position_embeddings=2048,
    )
    run = tmp_path / "run"
    named = (f"policy.model_name={folder}", f"reference.cache_dir={tmp_path}/cache", few_pairs(tmp_path))
    with pytest.raises(AuditError) as caught:
        short_run(run, *named, "policy.packing.pack_length=2048")
    assert re.fullmatch(
        r"audit: policy\.model_name = .*: .*few\.jsonl:\d+ \(completion [01]\): its log-probabilities at the end of a row of "
        r"2,048 tokens differ from those at the beginning by [\d.e-]+ nats a token \(rounding explains 0\.0001\), so losses "
        r"would be wrong\. Nothing was trained\. Lower policy\.packing\.pack_length, or train this model with "
        r"policy\.packing\.mode=none, and report it\.",
        str(caught.value),
    )
    assert_nothing_was_trained(run)
    assert not list((tmp_path / "cache").glob("*"))
    short_run(tmp_path / "shorter", *named, "policy.packing.pack_length=1536", "dpo.max_num_steps=1")


@pytest.mark.parametrize("given", [[], ["policy.packing.share_prompts=false"], ["policy.packing.mode=none"]])
def test_if_every_preference_is_too_long_a_part_of_the_shortest_is_audited(given, tmp_path, capsys, monkeypatch):
    lengths = []
    plain = policy.Policy.plain_logps

    def noted(self, prompt, completion, **others):
        lengths.append(len(prompt) + len(completion))
        return plain(self, prompt, completion, **others)

    monkeypatch.setattr(policy.Policy, "plain_logps", noted)
    monkeypatch.setattr(audit, "_longest_that_fits", lambda *_: 30)
    loaded = load_config(
        None, [*SHORT, f"run.dir={tmp_path}/run", "dpo.max_num_steps=1", few_pairs(tmp_path, 12), *given]
    )
    train(loaded, Reporter("normal"))
    text = capsys.readouterr().out
    assert max(lengths) == 30
    assert "2 completions of up to 30 tokens" in text
    assert "not audited: 12 longer preferences" in text
    assert "memory, so of the shortest only a part is audited" in text
    assert float(re.search(r"policy = reference to (\S+) nats", text)[1]) < 1e-6


@pytest.mark.parametrize("longest", [1, 2, 7, 29])
def test_a_preference_is_cut_to_the_end_of_its_prompt_and_the_beginning_of_its_completions(longest):
    preference = random_preference(np.random.default_rng(0), max_prompt=40, max_completion=40)
    cut = audit._cut(preference, longest)
    assert cut.longest <= max(2, longest)
    assert len(cut.prompt) >= 1
    assert cut.prompt.tolist() == preference.prompt[-len(cut.prompt) :].tolist()
    for one, whole in zip(cut.completions, preference.completions, strict=True):
        assert one.tolist() == whole[: len(one)].tolist()
        assert len(one) >= 1
    assert audit._cut(preference, preference.longest) is preference
