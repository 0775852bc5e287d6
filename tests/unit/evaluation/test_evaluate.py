"""`evaluate` on a small model: the same numbers as training and as a plain forward pass, for pairs, K completions and scores."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import torch
from models import MODEL, model_folder, plain_token_logps, tiny_config
from pyarrow import parquet
from run_directories import make_run
from running import few_pairs, metrics_of, short_run
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tandem.embedded.files import VALIDATION
from tandem.errors import ConfigError, DataError, OutOfMemoryError
from tandem.evaluation import measure as measuring
from tandem.evaluation.evaluate import evaluate
from tandem.evaluation.intervals import Estimate
from tandem.evaluation.measure import measure_model
from tandem.evaluation.records import Comparison, Difference, DifferingPair, HarnessResult
from tandem.evaluation.request import check_request
from tandem.evaluation.rewardbench import ScoredPrompt, rewardbench_2, ties_score
from tandem.evaluation.show import _Printer, _show_comparison, _why_no_rewards, show
from tandem.report.reporter import Reporter
from tandem.terminal.console import SafeConsole

pytestmark = pytest.mark.usefixtures("of_a_command")

RANKED = [
    {
        "prompt": f"Question {i % 4}?",
        "source": "odd" if i % 2 else "even",
        "completions": [
            {"completion": "Yes, of course. " * (1 + i % 3), "score": 3},
            {"completion": "Perhaps.", "score": 2},
            {"completion": "No, never, not at all.", "score": 1},
        ],
    }
    for i in range(8)
]


def printed(found):
    out = io.StringIO()
    show(found, SafeConsole(file=out, width=300))
    return out.getvalue()


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """A model with other weights and the same tokenizer."""
    folder = model_folder(tmp_path_factory.mktemp("other"), "llama", initializer_range=0.05, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A short run with a validation at its end."""
    folder = tmp_path_factory.mktemp("trained")
    held_out = write(folder / "held_out.jsonl", [json.loads(line) for line in VALIDATION.read_text().splitlines()[:12]])
    return short_run(folder / "run", few_pairs(folder), f"data.validation.data_path={held_out}", "dpo.val_at_end=true")


@pytest.fixture
def ranked(tmp_path):
    return write(tmp_path / "ranked.jsonl", RANKED)


def reward_model(folder, num_labels=1, architecture="llama", **changes):
    """A model that gives a score to a sequence: a Llama to its last token; with the tokenizer of the small model."""
    config = tiny_config(architecture, vocab_size=2048, num_labels=num_labels, **changes)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return str(folder)


def test_a_run_has_the_numbers_of_its_last_validation_and_is_not_changed(run):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = evaluate(str(run))
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    (last,) = metrics_of(run, "exported-default")
    assert (found.total.num_pairs, found.scored_by, found.beta) == (12, "implicit reward", 0.1)
    names = {"accuracy": "accuracy", "logps_accuracy": "logps_accuracy", "loss": "loss"}
    for name, metric in (names | {"rewards_margin": "rewards_margin_mean"}).items():
        assert getattr(found.total, name).value == pytest.approx(last[metric], abs=1e-6), name


def test_log_probabilities_are_those_of_a_plain_forward_pass(other_model, ranked):
    """Of three completions all pairs are measured, packed, with the same sums as each sequence alone."""
    request = check_request(other_model, [ranked], reference=str(MODEL), beta=0.5)
    (only,) = measure_model(request.subject, request.data, None, Reporter("quiet")).sets
    table, store = only.table, only.set.store
    assert len(table) == 24
    for name, folder in (("logp", other_model), ("reference", MODEL)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            plain = [[float(tokens.sum()) for tokens in plain_token_logps(model, one)] for one in store]
        for side, which in (("chosen", table.winner), ("rejected", table.loser)):
            expected = [plain[index][number] for index, number in zip(table.preference, which, strict=True)]
            assert table[f"{name}_{side}"] == pytest.approx(np.array(expected), abs=1e-3)
    assert table["reward_chosen"] == pytest.approx(0.5 * (table["logp_chosen"] - table["reference_chosen"]))


def test_several_completions_are_compared_by_rank_and_as_best_of_n(other_model, ranked):
    found = evaluate(other_model, [ranked], by="source")
    assert found.scored_by == "log-probability"
    assert found.total.accuracy is None
    assert found.calibration is None
    assert {group.name: group.num_pairs for group in found.by_rank_distance} == {"1 apart": 16, "2 apart": 8}
    assert {group.name: group.num_pairs for group in found.by_field} == {"even": 12, "odd": 12}
    assert "\nBy source\n" in printed(found)
    assert (found.best_of_n.num_prompts, found.best_of_n.completions_per_prompt) == (8, 3.0)
    # "Perhaps." is the shortest, and so the most likely for a random model
    assert found.best_of_n.accuracy.value == 0


def test_beta_does_not_change_accuracies(other_model, ranked):
    small, large = (evaluate(other_model, [ranked], reference=str(MODEL), beta=beta) for beta in (0.01, 1.0))
    assert small.total.accuracy == large.total.accuracy
    assert large.total.rewards_margin.value == pytest.approx(100 * small.total.rewards_margin.value)


def test_the_reference_is_computed_once(other_model, ranked, monkeypatch):
    evaluate(other_model, [ranked], reference=str(MODEL))
    loaded = []
    load = measuring.load_policy
    monkeypatch.setattr(
        measuring, "load_policy", lambda source, *a, **k: loaded.append(source.name) or load(source, *a, **k)
    )
    evaluate(other_model, [ranked], reference=str(MODEL))
    assert loaded == [other_model]


def test_two_models_are_compared_on_the_same_pairs(other_model, ranked, tmp_path):
    copy = shutil.copytree(other_model, tmp_path / "copy")
    (copy / "vocabulary_notes.txt").touch()  # a copy without a difference is refused
    same = evaluate(other_model, [ranked], against=str(copy)).comparison
    assert [(one.difference.value, one.num_better, one.num_worse, one.p_value) for one in same.differences] == [
        (0, 0, 0, 1)
    ] * 2
    assert (same.num_pairs, same.num_left_out, same.pairs) == (24, 0, ())
    assert same.differences[0].difference.low < 0 < same.differences[0].difference.high
    differs = evaluate(other_model, [ranked], against=str(MODEL), reference=str(MODEL)).comparison
    assert [one.metric for one in differs.differences] == ["accuracy", "logps_accuracy", "logps_per_token_accuracy"]
    assert differs.differences[0].against == 0.5  # equal to its reference: every pair is a tie


def test_a_run_is_not_compared_with_the_checkpoint_that_it_exported(run, ranked):
    checkpoint = run / "checkpoints" / "latest"
    for model, other in [(run, checkpoint), (checkpoint, run)]:
        with pytest.raises(ConfigError) as caught:
            evaluate(str(model), [ranked], against=str(other))
        assert str(caught.value) == (
            f"--against {other}: the same weights as MODEL {model}, so there is nothing to compare. "
            "Give another model or run."
        )


def test_the_data_keys_of_a_run_apply_where_the_rows_have_them(run, tmp_path):
    renamed = [{"prompt": "Hi", "chosen": "yes", "rejected": "no"}, {"prompt": "Ho", "chosen": "no", "rejected": "yes"}]
    usual = write(tmp_path / "usual.jsonl", renamed)
    other = write(
        tmp_path / "other.jsonl",
        [{"q": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in renamed],
    )
    config = (run / "config.yaml").read_text()
    changed = tmp_path / "run"
    changed.mkdir()
    (changed / "model").symlink_to(run / "model")
    (changed / "rejects.jsonl").touch()
    for old, new in {"prompt_key: prompt": "prompt_key: q", "chosen_key: chosen": "chosen_key: good"}.items():
        config = config.replace(old, new)
    (changed / "config.yaml").write_text(config.replace("rejected_key: rejected", "rejected_key: bad"))
    found = evaluate(str(changed), [usual, other])
    assert [group.num_pairs for group in found.by_set] == [2, 2]
    assert found.by_set[0].rewards_margin == found.by_set[1].rewards_margin


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        (
            {"columns: {}": "columns: {prompt: 'q[0]', chosen: a.good, rejected: a.bad}"},
            lambda q, good, bad: {"q": [q], "a": {"good": good, "bad": bad}},
        ),
        (
            {"label_key: null": "label_key: best", "label_values: {}": "label_values: {1: a, 0: b}"},
            lambda q, good, bad: {"prompt": q, "response_a": good, "response_b": bad, "best": 1},
        ),
    ],
    ids=["columns", "labels"],
)
def test_the_paths_and_labels_of_a_run_apply_where_the_rows_fit(run, tmp_path, settings, row):
    pairs = [("Hi", "yes", "no"), ("Ho", "no", "yes")]
    usual = write(
        tmp_path / "usual.jsonl", [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    )
    other = write(tmp_path / "other.jsonl", [row(*pair) for pair in pairs])
    changed = tmp_path / "run"
    changed.mkdir()
    (changed / "model").symlink_to(run / "model")
    (changed / "rejects.jsonl").touch()
    config = (run / "config.yaml").read_text()
    for old, new in settings.items():
        assert old in config
        config = config.replace(old, new)
    (changed / "config.yaml").write_text(config)
    found = evaluate(str(changed), [usual, other])
    assert [group.num_pairs for group in found.by_set] == [2, 2]
    assert found.by_set[0].rewards_margin == found.by_set[1].rewards_margin


REWARDBENCH = [
    {
        "prompt": f"Question {i}?",
        "chosen": "Yes.",
        "rejected": "No, not at all.",
        "subset": subset,
        "id": i,
        "chosen_model": "a",
    }
    for i, subset in enumerate(["alpacaeval-easy", "math-prm", "hep-go"])
]
REWARDBENCH_2 = [
    {"id": "7", "prompt": "Why?", "chosen": ["So."], "rejected": ["Not so at all.", "Because it is so."], "num_correct": 1,
     "total_completions": 3, "subset": "Factuality"},
    {"id": "tied:0", "prompt": "A colour?", "chosen": ["Red.", "Blue."], "rejected": ["A very long seven."], "num_correct": 2,
     "total_completions": 3, "subset": "Ties"},
    {"id": "ref:0", "prompt": "The colour of grass?", "chosen": ["Green."], "rejected": ["A very long seven."], "num_correct": 1,
     "total_completions": 2, "subset": "Ties"},
]  # fmt: skip


def test_rewardbench_files_are_recognised_by_their_columns(other_model, tmp_path):
    one, two = write(tmp_path / "filtered.jsonl", REWARDBENCH), write(tmp_path / "test.jsonl", REWARDBENCH_2)
    file = tmp_path / "pairs.out"
    found = evaluate(other_model, [one, two], per_pair=file)
    first, second = found.benchmarks
    # For a random model the shorter completion is the more likely one.
    assert (first.name, first.sections) == ("RewardBench", {"Chat": 1.0, "Reasoning": 1.0})
    assert (second.name, list(second.subsets), second.num_prompts) == (
        "RewardBench 2",
        ["Factuality", "Ties"],
        {"Factuality": 1, "Ties": 2},
    )
    assert second.subsets["Factuality"] == 1.0
    scores = {line["place"]: {} for line in map(json.loads, file.read_text().splitlines())}
    for line in map(json.loads, file.read_text().splitlines()):
        scores[line["place"]] |= {line["chosen"]: line["logp_chosen"], line["rejected"]: line["logp_rejected"]}
    tied, ref = ([of[number] for number in sorted(of)] for of in (scores[f"{two}:2"], scores[f"{two}:3"]))
    expected = ties_score([ScoredPrompt("", "tied:0", tied, 2, 1.0), ScoredPrompt("", "ref:0", ref, 1, 1.0)])
    assert second.subsets["Ties"] == pytest.approx(expected)
    assert second.score == pytest.approx((1 + expected) / 2)


def test_tables_of_rewardbench_have_the_scale_of_other_tables(other_model, tmp_path):
    found = evaluate(other_model, [write(tmp_path / "filtered.jsonl", REWARDBENCH)])
    assert (found.by, {group.name for group in found.by_field}) == ("subset", {"alpacaeval-easy", "math-prm", "hep-go"})
    lines = printed(found).splitlines()
    assert "By subset" in lines
    at = lines.index("RewardBench score  1.000")
    assert " ".join(lines[at + 1 :]) == (
        "Not in the score (no prompts): alpacaeval-length, alpacaeval-hard, mt-bench-easy, mt-bench-med, Chat Hard, Safety, "
        "hep-cpp, hep-java, hep-js, hep-python, hep-rust, Prior Sets."
    )
    assert ["math-prm", "1", "1.000"] in [line.split() for line in lines]
    # 0.01 above 1: the spread of the correct completions is 0.
    ties = rewardbench_2(
        [ScoredPrompt("Ties", "tied:0", (3, 3, 1), 2, 1.0), ScoredPrompt("Ties", "ref:0", (2, 1), 1, 1.0)]
    )
    lines = printed(replace(found, benchmarks=(ties,))).splitlines()
    assert lines[-3:] == [
        "RewardBench 2 score  1.010",
        "Not in the score (no prompts): Factuality, Precise IF, Math, Safety, Focus.",
        "The published formula of Ties gives -0.01 to 1.01.",
    ]
    unknown = replace(found.benchmarks[0], missing=(), uncounted=("mine",))
    lines = printed(replace(found, benchmarks=(unknown,))).splitlines()
    assert lines[-1] == "Not in the score (not part of RewardBench): mine."


@pytest.mark.parametrize("id", ["1", "Ref:1", "tied:one", "tied:1:2"])
def test_ids_of_ties_that_are_not_those_published_are_refused(other_model, tmp_path, id):
    file = write(tmp_path / "test.jsonl", [*REWARDBENCH_2[:2], REWARDBENCH_2[2] | {"id": id}])
    with pytest.raises(DataError) as caught:
        evaluate(other_model, [file])
    assert str(caught.value) == (
        f"{file}:3: id = {id!r}, but the score of Ties needs ref:N for a prompt with one correct completion and tied:N for its "
        "counterpart with several, such as ref:7 and tied:7. Give the published ids, or leave out the rows of Ties."
    )


def test_an_id_of_ties_that_two_rows_have_is_refused(other_model, tmp_path):
    file = write(tmp_path / "test.jsonl", [*REWARDBENCH_2, REWARDBENCH_2[2] | {"id": "ref:00"}])
    with pytest.raises(DataError) as caught:
        evaluate(other_model, [file])
    assert str(caught.value) == (
        f"{file}:4: id = ref:00 is that of {file}:3 too, but the score of Ties needs different ids. Remove one of the rows."
    )


def test_rows_of_rewardbench_2_without_an_id_are_refused_with_their_numbers(other_model, tmp_path):
    without = [{key: value for key, value in row.items() if key != "id"} for row in REWARDBENCH_2]
    ending = (
        "no id, which every row of RewardBench 2 has. Give the published ids, or leave out the key total_completions to measure "
        "the file as plain pairs."
    )
    for rows, places in (
        (without, "{0}:1, {0}:2, {0}:3"),
        ([*without, without[0]], "{0}:1, {0}:2, {0}:3 and 1 more"),
        ([REWARDBENCH_2[0], without[1], REWARDBENCH_2[2] | {"id": None}], "{0}:2, {0}:3"),
        ([REWARDBENCH_2[0] | {"id": ""}, *REWARDBENCH_2[1:]], "{0}:1"),
    ):
        file = write(tmp_path / "test.jsonl", rows)
        with pytest.raises(DataError) as caught:
            evaluate(other_model, [file])
        assert str(caught.value) == f"{places.format(file)}: {ending}"
    plain = [{key: value for key, value in row.items() if key != "total_completions"} for row in without]
    assert evaluate(other_model, [write(tmp_path / "plain.jsonl", plain)]).benchmarks == ()


def test_a_ref_prompt_of_ties_has_one_correct_completion(other_model, tmp_path):
    several = {"chosen": ["Green.", "Yellow."], "num_correct": 2, "total_completions": 3}
    file = write(tmp_path / "test.jsonl", [*REWARDBENCH_2[:2], REWARDBENCH_2[2] | several])
    with pytest.raises(DataError) as caught:
        evaluate(other_model, [file])
    assert str(caught.value) == (
        f"{file}:3: id = ref:0, but chosen has 2 completions. The score of Ties needs one correct completion of ref:N and "
        "several of its counterpart, tied:N. Correct the id or chosen."
    )


def test_a_wrong_number_of_correct_completions_is_refused_with_its_line(other_model, tmp_path):
    file = write(tmp_path / "test.jsonl", [*REWARDBENCH_2[:1], REWARDBENCH_2[1] | {"num_correct": 4}])
    with pytest.raises(DataError) as caught:
        evaluate(other_model, [file])
    assert f"{file}:2: num_correct: 4, and chosen has 2 correct completions. Correct one of them." in str(caught.value)


def test_a_wrong_number_of_completions_is_refused_with_its_line(other_model, tmp_path):
    file = write(tmp_path / "test.jsonl", [*REWARDBENCH_2[:1], REWARDBENCH_2[1] | {"total_completions": 4}])
    with pytest.raises(DataError) as caught:
        evaluate(other_model, [file])
    expected = f"{file}:2: total_completions: 4, and chosen and rejected have 3 completions. Correct one of them."
    assert expected in str(caught.value)


def test_a_letter_means_the_same_model_in_a_comparison_and_in_tasks_of_the_harness(other_model, ranked):
    found = evaluate(other_model, [ranked], against=str(MODEL))
    values = {"base": 0.1, str(MODEL): 0.2, other_model: 0.3}
    task = HarnessResult(task="arc", metric="acc", values=values, stderrs={})
    lines = [line.strip() for line in printed(replace(found, harness=(task,))).splitlines()]
    assert f"Accuracy of {other_model} (A) against {MODEL} (B), 24 pairs" in " ".join(lines)
    assert f"Rewards are not compared: {other_model} and {MODEL} have no reference." in " ".join(lines)
    assert lines[lines.index("LM Evaluation Harness") + 1 :][:3] == [f"A: {other_model}", f"B: {MODEL}", "C: base"]
    assert lines[-1].split() == ["arc", "acc", "0.3", "0.2", "0.1"]
    swapped = {other_model: 0.3, str(MODEL): 0.2}  # its own reference: it ran first
    lines = printed(replace(found, harness=(replace(task, values=swapped),))).splitlines()
    assert f"  A: {other_model}" in lines


# In an encoder, padding that is not masked would change the score.
REWARD_MODELS = {"padded": {}, "alone": {"pad_token_id": None}, "encoder": {"architecture": "bert"}}


def test_a_reward_model_is_measured_by_its_scores(tmp_path, ranked):
    """Scores in padded batches, and one by one where the model has no padding token, are those of each sequence alone."""
    for name, changes in REWARD_MODELS.items():
        folder = reward_model(tmp_path / name, **changes)
        request = check_request(folder, [ranked])
        measured = measure_model(request.subject, request.data, None, Reporter("quiet"))
        (only,) = measured.sets
        table, model = only.table, AutoModelForSequenceClassification.from_pretrained(folder)
        for index, number, score in zip(table.preference, table.winner, table["reward_chosen"], strict=True):
            one = only.set.store[index]
            ids = torch.from_numpy(np.concatenate([one.prompt, one.completions[number]]).astype(np.int64))[None]
            with torch.no_grad():
                assert score == pytest.approx(float(model(ids).logits), abs=1e-5)
        assert np.ptp(table["reward_chosen"]) > 0.01
    found = evaluate(folder, [ranked])
    assert (found.scored_by, found.total.logps_accuracy, found.calibration, found.beta) == (
        "model score",
        None,
        None,
        None,
    )
    assert found.total.accuracy is not None


def test_a_reward_model_scores_rewardbench_2(tmp_path):
    found = evaluate(reward_model(tmp_path / "rm"), [write(tmp_path / "test.jsonl", REWARDBENCH_2)])
    assert found.benchmarks[0].name == "RewardBench 2"


def test_models_that_are_no_reward_models_are_refused(tmp_path, ranked):
    folder = reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(ConfigError) as caught:
        evaluate(folder, [ranked])
    assert str(caught.value) == (
        f"MODEL {folder}: a sequence-classification model with 2 labels. A reward model gives one score, so it has one label "
        "(num_labels = 1)."
    )
    folder = reward_model(tmp_path / "one")
    with pytest.raises(ConfigError) as caught:
        evaluate(folder, [ranked], reference=str(MODEL))
    assert str(caught.value) == (
        f"--reference {MODEL}: {folder} is a sequence-classification model, which gives each completion a score and has no "
        "reference. Leave it out."
    )


def test_too_little_memory_is_answered_with_keys_that_an_evaluation_takes(other_model, ranked, monkeypatch):
    def fails(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(measuring, "measure", fails)
    with pytest.raises(OutOfMemoryError) as refused:
        evaluate(other_model, [ranked], overrides=["policy.precision=float32"])
    assert str(refused.value) == (
        "CUDA out of memory. To use less memory, try policy.packing.pack_length below 1024 (rows may be as short as the longest "
        "preference); then policy.precision=bfloat16."
    )


def test_the_format_function_of_a_run_reads_a_file_that_no_format_fits(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "def mine(row):\n    return {'prompt': row['q'], 'chosen': row['good'], 'rejected': row['bad']}\n"
    (tmp_path / "mine.py").write_text(code)
    pairs = [("Hi", "yes", "no"), ("Ho", "no", "yes")]
    usual = write(
        tmp_path / "usual.jsonl", [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    )
    own = write(tmp_path / "own.jsonl", [dict(zip(("q", "good", "bad"), pair, strict=True)) for pair in pairs])
    changed = tmp_path / "run"
    changed.mkdir()
    (changed / "model").symlink_to(run / "model")
    (changed / "rejects.jsonl").touch()
    config = (run / "config.yaml").read_text()
    (changed / "config.yaml").write_text(config.replace("dataset_name: auto", "dataset_name: mine.py:mine"))
    found = evaluate(str(changed), [usual, own], allow_code=True)
    assert [group.num_pairs for group in found.by_set] == [2, 2]
    assert found.by_set[0].rewards_margin == found.by_set[1].rewards_margin
    assert evaluate(str(changed), [usual]).total.num_pairs == 2  # a file that needs no code needs no permission
    # Another model reads the file with the format of the run that it is compared with, so that both have the same pairs.
    assert evaluate(str(MODEL), [own], against=str(changed), allow_code=True).comparison.num_pairs == 2
    # A file that the function cannot read either: the advice is about the keys of its rows, not about the function.
    with pytest.raises(
        DataError, match=r"none of the keys prompt, chosen, rejected\. Keys found: a\. Set data\.default"
    ):
        evaluate(str(changed), [write(tmp_path / "odd.jsonl", [{"a": 1}])], allow_code=True)


def test_one_pair_is_written_in_the_singular(other_model, ranked, tmp_path):
    file = write(tmp_path / "one.jsonl", [{"prompt": "Hi", "chosen": "yes", "rejected": "no"}])
    found = evaluate(other_model, [file], against=str(MODEL))
    out = printed(found)
    assert "\n1 pair of 1 prompt, float32 (" in out
    assert "\nOnly 1 prompt: the intervals" in out
    assert f"against {MODEL} (B), 1 pair metric" in " ".join(out.split())
    assert ", 1 pair of 1 prompt\n" in repr(found)
    one_left_out = replace(found, comparison=replace(found.comparison, num_left_out=1))
    assert "\n1 pair that only one of them could read is left out\n" in printed(one_left_out)


def test_best_of_n_says_how_many_completions_there_are(other_model, ranked):
    found = evaluate(other_model, [ranked])
    assert "\nbest of 3 right (8 prompts) " in printed(found)
    mixed = replace(found.best_of_n, completions_per_prompt=4.0, is_mixed=True, num_prompts=1)
    assert "\nbest of N right, N 4 on average (1 prompt) " in printed(replace(found, best_of_n=mixed))


def test_errors_of_rows_name_the_key_that_sets_how_data_is_read(other_model, tmp_path):
    file = write(tmp_path / "odd.jsonl", [{"a": 1, "b": 2}])
    with pytest.raises(DataError) as caught:
        evaluate(other_model, [file])
    assert "Set data.default.prompt_key" in str(caught.value)
    assert "data.train" not in str(caught.value)


def test_tables_fit_80_columns_and_show_hostile_names_as_text(other_model, tmp_path, capsys):
    rows = [{**row, "source": "\x1b[31mred" if i % 2 else "x" * 100} for i, row in enumerate(RANKED)]
    file = write(tmp_path / "a_very_long_name_of_a_file_with_ranked_completions.jsonl", rows)
    found = evaluate(other_model, [file, str(VALIDATION)], reference=str(MODEL), against=str(MODEL))
    show(found, SafeConsole())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    too_wide = [line for line in out.splitlines() if len(line) > 80 and "/" not in line]
    assert too_wide == []
    assert "reward accuracy" in out
    assert SimpleNamespace(**found.as_dict()).total["num_pairs"] == 94


@pytest.mark.parametrize(
    "settings",
    [
        ["dpo.preference_loss=simpo", "dpo.reference_policy_kl_penalty=2"],
        ["policy.lora.enabled=true", "policy.lora.dim=4", "export.merge_lora=false"],
    ],
    ids=["without a reference", "adapters alone"],
)
def test_other_runs_have_the_numbers_of_their_last_validation(tmp_path, settings):
    held_out = write(
        tmp_path / "held_out.jsonl", [json.loads(line) for line in VALIDATION.read_text().splitlines()[:6]]
    )
    data = [few_pairs(tmp_path, 16), f"data.validation.data_path={held_out}", "dpo.val_at_end=true"]
    folder = short_run(tmp_path / "run", *data, *settings)
    found = evaluate(str(folder))
    (last,) = metrics_of(folder, "exported-default")
    assert found.scored_by == "implicit reward"
    assert found.total.accuracy.value == pytest.approx(last["accuracy"])
    assert found.total.rewards_margin.value == pytest.approx(last["rewards_margin_mean"], abs=1e-6)
    assert (found.reference is None) == ("simpo" in settings[0])


def test_prior_sets_are_recognised_by_the_name_of_the_file(other_model, tmp_path):
    rows = [{"prompt": "Why?", "chosen": "So.", "rejected": "Not so at all."}]
    prior = tmp_path / "anthropic_hhh-00000-of-00001.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), prior)
    found = evaluate(other_model, [str(prior), write(tmp_path / "filtered.jsonl", REWARDBENCH)])
    (only,) = found.benchmarks
    assert only.sections == {"Chat": 1.0, "Reasoning": 1.0, "Prior Sets": 1.0}
    assert only.num_prompts == {"anthropic_hhh": 1, "alpacaeval-easy": 1, "math-prm": 1, "hep-go": 1}


@pytest.mark.parametrize(("num_worse", "ending"), [(0, ""), (19, ": 5 of 24 (--json lists up to 20)")])
def test_a_comparison_says_how_many_of_the_differing_pairs_it_lists(num_worse, ending):
    estimate = Estimate(0.5, 0.4, 0.6)
    difference = Difference(
        metric="accuracy", value=0.5, against=0.4, difference=estimate, num_better=5, num_worse=num_worse, p_value=0.1
    )
    pairs = tuple(DifferingPair("a.jsonl:1", 0, 1, 2.0, -1.0) for _ in range(min(20, 5 + num_worse)))
    found = Comparison(
        against="b",
        scored_by="log-probability",
        num_pairs=40,
        num_left_out=0,
        differences=(difference,),
        metric="accuracy",
        pairs=pairs,
    )
    out = io.StringIO()
    _show_comparison("a", found, _Printer(SafeConsole(file=out, width=120)))
    assert f"Pairs that they order differently by reward{ending}\n" in out.getvalue()
    assert out.getvalue().count("a.jsonl:1") == 5


@pytest.mark.parametrize(
    ("model", "reference", "other", "other_reference", "note"),
    [
        ("{0}", "base", "{1}", "base", None),
        ("{0}", "base", "base", None, "base is the reference, and its rewards are all zero."),
        (
            *("{0}", "base", "{1}/model", None),
            "{1}/model is a model folder without a reference. To compare them, give the run, {1}, or add --reference MODEL.",
        ),
        (
            *("{0}/model", None, "{1}/model", None),
            "{0}/model and {1}/model are model folders without a reference. To compare them, give the runs, {0} and {1}, or add "
            "--reference MODEL.",
        ),
        ("base", None, "{1}", "base", "base has no reference. To compare them, add --reference MODEL."),
        (
            *("base", None, "{1}/model", None),
            "base and {1}/model have no reference. To compare them, add --reference MODEL.",
        ),
    ],
)
@pytest.mark.usefixtures("of_a_command")
def test_a_comparison_without_rewards_says_why(tmp_path, monkeypatch, model, reference, other, other_reference, note):
    monkeypatch.chdir(tmp_path)
    runs = [make_run(Path(name)) for name in "ab"]
    by = {None: "log-probability", "base": "implicit reward"}
    found = SimpleNamespace(model=model.format(*runs), reference=reference, scored_by=by[reference])
    comparison = Comparison(
        against=other.format(*runs),
        scored_by=by[other_reference],
        num_pairs=1,
        num_left_out=0,
        differences=(),
        metric="",
        pairs=(),
    )
    expected = "" if note is None else f"Rewards are not compared: {note.format(*runs)}"
    assert _why_no_rewards(found, comparison) == expected
