"""A run logs its metrics under the names of NeMo RL and TRL too, with values recomputed here from metrics.jsonl and the pairs."""

import json
from pathlib import Path

import pytest
from fake_tracker import put_in_front
from running import few_pairs, killed_after, metrics_of, short_run

from tandem.config.load import load_config
from tandem.report.reporter import Reporter
from tandem.report.trackers import tracking as feed
from tandem.training.trainer import train

BETA = 0.1
BOTH = ["logger.log_nemo_names=true", "logger.log_trl_names=true"]
# Our metrics whose names have another meaning in NeMo RL.
MOVED = ("accuracy", "rewards_chosen_mean", "rewards_rejected_mean")


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(feed, "CLOSE_SECONDS", 120.0)  # so short a run may end before they are open, on a busy machine


def tracked(monkeypatch, folder: Path) -> Path:
    """Put a fake package wandb in front, which writes each record as a line of JSON to the returned file."""
    path = folder / "logged.jsonl"
    log = f"import json; open({str(path)!r}, 'a').write(json.dumps([step, metrics]) + '\\n')"
    put_in_front(monkeypatch, folder / "package", log=log)
    return path


def read(path: Path) -> list[tuple[int, dict[str, float]]]:
    return [(step, metrics) for step, metrics in map(json.loads, path.read_text().splitlines())]


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def in_our_names(record):
    timing = ("step_seconds", "loader_wait_seconds", "pairs_per_second", "tokens_per_second", "memory_gib")
    split = record["split"]
    return {
        f"timing/{split}/{name}" if name in timing else f"{split}/{name}": value
        for name, value in record.items()
        if name not in ("step", "split", "data")
    }


def in_nemos_names(record):
    split = record["split"]
    num_pairs, tokens = record["num_pairs"], record["tokens_chosen_mean"] + record["tokens_rejected_mean"]
    theirs = {
        "accuracy": record["accuracy_strict"],
        "rewards_chosen_mean": record["rewards_chosen_mean"] / BETA,
        "rewards_rejected_mean": record["rewards_rejected_mean"] / BETA,
        "num_valid_samples": num_pairs,
        "global_valid_seqs": 2 * num_pairs,
        "global_valid_toks": tokens * num_pairs,
    }
    shown = {f"{split}/{name}": value for name, value in theirs.items()}
    shown |= {f"tandem/{split}/{name}": record[name] for name in MOVED}
    return shown | ({"timing/train/policy_training": record["step_seconds"]} if split == "train" else {})


def in_trls_names(record, prefix, num_steps_of_an_epoch):
    shown = {
        "loss": record["loss"],
        "rewards/chosen": BETA * record["logratios_chosen_mean"],
        "rewards/rejected": BETA * record["logratios_rejected_mean"],
        "rewards/margins": BETA * (record["logratios_chosen_mean"] - record["logratios_rejected_mean"]),
        "rewards/accuracies": record["logratios_accuracy"],
        "logps/chosen": record["logps_chosen_mean"],
        "logps/rejected": record["logps_rejected_mean"],
    }
    if record["split"] == "train":
        epoch = record["step"] / num_steps_of_an_epoch
        shown |= {"grad_norm": record["grad_norm"], "learning_rate": record["lr"], "epoch": epoch}
    return {prefix + name: value for name, value in shown.items()} | {"train/global_step": record["step"]}


def expected(record, num_steps_of_an_epoch):
    """What W&B gets of a record, with both keys and one validation set named default."""
    ours, split = in_our_names(record), record["split"]
    if split == "timing/validation":
        seconds = record["default_seconds"]
        nemo = ("timing/validation-default/total_validation_time", "timing/validation/total_validation_time")
        return ours | dict.fromkeys(nemo, seconds) | {"eval/runtime": seconds, "train/global_step": record["step"]}
    if split.startswith("exported-"):
        return ours
    prefix = "train/" if split == "train" else "eval/"
    return ours | in_nemos_names(record) | in_trls_names(record, prefix, num_steps_of_an_epoch)


def check(logged: Path, run: Path, num_steps_of_an_epoch: int) -> None:
    found, written = read(logged), records(run)
    assert [record["split"] for record in written] == [
        *("validation-default", "timing/validation", "train", "train"),
        *("validation-default", "timing/validation", "exported-default"),
    ]
    assert [step for step, _ in found] == [record["step"] for record in written]
    for (_, shown), record in zip(found, written, strict=True):
        assert shown == pytest.approx(expected(record, num_steps_of_an_epoch), rel=1e-12)
    # Before training, policy and reference are equal. NeMo RL and TRL do not count such ties as one half.
    (_, start), (_, end) = found[0], found[4]
    assert (start["tandem/validation-default/accuracy"], start["validation-default/accuracy"]) == (0.5, 0.0)
    # For this loss, NeMo RL's rewards are log-ratios, and TRL's rewards are ours.
    assert end["validation-default/rewards_chosen_mean"] == pytest.approx(written[4]["logratios_chosen_mean"], rel=1e-4)
    assert end["eval/rewards/chosen"] == pytest.approx(written[4]["rewards_chosen_mean"], rel=1e-4)


TWO_STEPS = ["dpo.max_num_steps=2", "policy.train_global_batch_size=4", "dpo.val_batches=1", "dpo.val_period=0"]


def test_a_run_logs_its_metrics_under_all_three_names(monkeypatch, tmp_path):
    logged = tracked(monkeypatch, tmp_path)
    data = [few_pairs(tmp_path / "data", 20), f"data.validation={tmp_path}/data/few.jsonl"]
    validations = ["dpo.val_at_start=true", "dpo.val_at_end=true"]
    run = short_run(tmp_path / "run", *data, *TWO_STEPS, *validations, *BOTH, "logger.wandb_enabled=true")
    check(logged, run, num_steps_of_an_epoch=5)


@pytest.mark.slow
def test_a_run_of_the_embedded_model_logs_its_metrics_under_all_three_names(monkeypatch, tmp_path):
    logged, run = tracked(monkeypatch, tmp_path), tmp_path / "run"
    train(load_config(None, [*TWO_STEPS, *BOTH, "logger.wandb_enabled=true", f"run.dir={run}"]), Reporter("quiet"))
    check(logged, run, num_steps_of_an_epoch=370 // 4)  # embedded pairs and batch size; the last two pairs are dropped


def test_without_the_keys_a_run_logs_our_names_only(monkeypatch, tmp_path):
    logged = tracked(monkeypatch, tmp_path)
    data = [few_pairs(tmp_path / "data", 8), f"data.validation={tmp_path}/data/few.jsonl", "dpo.max_num_steps=1"]
    run = short_run(tmp_path / "run", *data, "dpo.val_at_end=true", "logger.wandb_enabled=true")
    assert read(logged) == [(record["step"], in_our_names(record)) for record in records(run)]


@pytest.mark.parametrize("loss", ["sigmoid_norm", "simpo"])
def test_rewards_are_theirs_for_a_loss_per_token_with_and_without_a_reference(monkeypatch, tmp_path, loss):
    """The values of every pair after training, against those of the last validation in the tracker."""
    logged, per_pair = tracked(monkeypatch, tmp_path), tmp_path / "pairs.jsonl"
    few = few_pairs(tmp_path / "data", 12)
    settings = [few, f"data.validation={tmp_path}/data/few.jsonl", f"dpo.preference_loss={loss}", "dpo.val_at_end=true"]
    beta = 2.0
    run = short_run(
        tmp_path / "run",
        *(*settings, *BOTH, "logger.wandb_enabled=true", f"dpo.reference_policy_kl_penalty={beta}"),
        per_pair=per_pair,
    )
    pairs = [json.loads(line) for line in per_pair.read_text().splitlines()]
    pairs = [pair for pair in pairs if pair["split"] == "validation-default"]
    (shown,) = [metrics for _, metrics in read(logged) if "eval/loss" in metrics]
    assert len(pairs) == shown["validation-default/num_valid_samples"] == 12

    def mean(value):
        return pytest.approx(sum(map(value, pairs)) / len(pairs), rel=1e-4)

    def sums(pair, which):
        return pair[f"logp_{which}"] - (pair[f"reference_{which}"] if loss == "sigmoid_norm" else 0.0)

    def per_token(pair, which):
        return sums(pair, which) / pair[f"tokens_{which}"]

    trl = (
        sums if loss == "sigmoid_norm" else per_token
    )  # TRL's DPOTrainer logs sums, its CPOTrainer what simpo compares
    for which in ("chosen", "rejected"):
        assert shown[f"validation-default/rewards_{which}_mean"] == mean(
            lambda pair, which=which: per_token(pair, which)
        )
        assert shown[f"eval/rewards/{which}"] == mean(lambda pair, which=which: beta * trl(pair, which))
        logp = (lambda pair, which=which: pair[f"logp_{which}"]) if loss == "sigmoid_norm" else trl
        assert shown[f"eval/logps/{which}"] == mean(lambda pair, which=which, logp=logp: logp(pair, which=which))
    assert shown["eval/rewards/accuracies"] == mean(lambda pair: trl(pair, "chosen") > trl(pair, "rejected"))
    assert shown["eval/rewards/margins"] == mean(lambda pair: beta * (trl(pair, "chosen") - trl(pair, "rejected")))
    assert metrics_of(run, "validation-default")[-1]["rewards_chosen_mean"] == mean(
        lambda pair: beta * per_token(pair, "chosen")
    )


def test_two_validation_sets_have_names_of_their_own(monkeypatch, tmp_path):
    logged = tracked(monkeypatch, tmp_path)
    sets = f"data.val_data_paths={{easy: {tmp_path}/data/few.jsonl, hard: {tmp_path}/data/few.jsonl}}"
    settings = [few_pairs(tmp_path / "data", 8), sets, "dpo.max_num_steps=1", "dpo.val_at_end=true"]
    run = short_run(tmp_path / "run", *settings, *BOTH, "logger.wandb_enabled=true")
    found = {name: value for _, metrics in read(logged) for name, value in metrics.items()}
    for name in ("easy", "hard"):
        (record,) = metrics_of(run, f"validation-{name}")
        assert found[f"validation-{name}/rewards_chosen_mean"] == pytest.approx(record["rewards_chosen_mean"] / BETA)
        assert found[f"tandem/validation-{name}/rewards_chosen_mean"] == record["rewards_chosen_mean"]
        assert found[f"eval/{name}_loss"] == record["loss"]
        assert found[f"eval/{name}_rewards/accuracies"] == record["logratios_accuracy"]
        assert found[f"eval/{name}_runtime"] == found[f"timing/validation-{name}/total_validation_time"]
    assert not any(name in found for name in ("eval/loss", "eval/rewards/chosen", "eval/runtime"))


def test_a_resumed_run_logs_the_other_names_of_each_step_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = [
        *("dpo.max_num_steps=5", "dpo.val_period=2", "dpo.val_at_end=true", "checkpointing.save_period=2"),
        *("dpo.val_batches=1", "dpo.val_global_batch_size=4", "logger.tensorboard_enabled=true", *BOTH),
        *(few_pairs(tmp_path / "data", 20), f"data.validation={tmp_path}/data/few.jsonl"),
    ]
    with killed_after(3):
        short_run(tmp_path / "run", *settings)
    run = short_run(tmp_path / "run", *settings)
    events = EventAccumulator(str(run / "logs/tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    steps = {name: [step for step, _ in values] for name, values in shown.items()}
    theirs = ("accuracy", "rewards_chosen_mean", "global_valid_toks", "rewards/chosen", "logps/rejected")
    trained = [*(f"train/{name}" for name in theirs), "train/learning_rate", "tandem/train/accuracy"]
    validated = ["validation-default/rewards_chosen_mean", "eval/rewards/chosen", "eval/runtime"]
    assert {name: steps[name] for name in trained} == {name: [1, 2, 3, 4, 5] for name in trained}
    assert {name: steps[name] for name in validated} == {name: [2, 4, 5] for name in validated}
    rewards = [(one["step"], one["rewards_chosen_mean"]) for one in metrics_of(run)]
    for name, scale in (("train/rewards_chosen_mean", 1 / BETA), ("tandem/train/rewards_chosen_mean", 1)):
        assert shown[name] == [(step, pytest.approx(scale * value, rel=1e-5)) for step, value in rewards]
