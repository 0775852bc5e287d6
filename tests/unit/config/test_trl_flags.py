"""Flags of `trl dpo` after `--`, alone and together with a file of --config."""

import json
from pathlib import Path

import pytest
import yaml

from tandem.config.load import load_config
from tandem.errors import ConfigError

pytestmark = pytest.mark.usefixtures("of_a_command")

MODEL = ["--model_name_or_path", "org/model", "--dataset_name", "org/pairs"]


def load(*flags: str, file: str | None = None, from_format: str | None = "trl"):
    return load_config(file, list(flags), from_format=from_format)


def test_flags_have_values_of_every_form():
    loaded = load(
        *MODEL,
        *("--learning_rate", "5.0e-7"),
        "--beta=0.3",
        *("--loss_type", "sigmoid", "bco_pair", "--loss_weights", "0.8", "0.2"),
        *("--max_steps", "-1", "--num-train-epochs", "2"),
        "--full_determinism",
        "--no_bf16",
        *("--dataloader_drop_last", "True", "--no_cuda", "False"),
        *("--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'),
    )
    config = loaded.config
    assert config.policy.optimizer.kwargs.lr == 5e-7
    assert config.dpo.reference_policy_kl_penalty == 0.3
    assert config.dpo.preference_loss == {"sigmoid": 0.8, "bco_pair": 0.2}
    assert (config.dpo.max_num_steps, config.dpo.max_num_epochs) == (None, 2)
    assert (config.run.deterministic, config.policy.precision, config.data.drop_last) == (True, "float32", True)
    assert config.policy.scheduler.min_lr_ratio == 0.1
    rows = {row.key: row.value for row in loaded.translation.rows}
    assert (rows["full_determinism"], rows["bf16"], rows["no_cuda"], rows["max_steps"]) == (True, False, False, -1)


def test_flags_count_more_than_the_file(tmp_path):
    path = tmp_path / "theirs.yaml"
    path.write_text(
        yaml.safe_dump({"model_name_or_path": "org/model", "dataset_name": "a/b", "beta": 0.5, "max_length": 64})
    )
    for given in ([*("--config", str(path), "--beta", "0.2")], [*("--beta", "0.2"), f"--config={path}"]):
        loaded = load(*given)
        assert loaded.file == str(path)
        assert loaded.config.dpo.reference_policy_kl_penalty == 0.2
        assert loaded.config.policy.max_total_sequence_length == 64
    beside = load("--beta", "0.2", file=str(path))
    assert beside.config.dpo.reference_policy_kl_penalty == 0.2


def test_keys_of_tandem_may_stand_before_and_after_flags():
    config = load("run.name=first", *MODEL, "--beta", "0.2", "dpo.max_num_steps=3").config
    assert (config.run.name, config.dpo.max_num_steps, config.dpo.reference_policy_kl_penalty) == ("first", 3, 0.2)


def test_without_a_file_nothing_comes_from_the_embedded_default():
    loaded = load(*MODEL)
    assert {row.kind for row in loaded.translation.rows} == {"translated", "default"}
    assert loaded.config.policy.optimizer.kwargs.lr == 1e-6


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--learning_rat", "1e-6"],
            "TRL configuration: a key cannot be translated.\n"
            "  command line: learning_rat = 1e-06: tandem does not know this key of TRL. Did you mean learning_rate? Otherwise "
            "remove it.",
        ),
        (["--beta.x", "1"], "--beta.x: not the name of a flag. Write --NAME VALUE."),
        (["--config"], "--config: 0 files are given. Give one."),
        (["--config", "a.yaml", "b.yaml"], "--config: 2 files are given. Give one."),
        (
            ["--config", "a.yaml", "--config", "b.yaml"],
            "--config is given twice, with a.yaml and b.yaml. Leave out one of them.",
        ),
    ],
)
def test_wrong_flags_are_refused(flags, message):
    with pytest.raises(ConfigError) as error:
        load(*MODEL, *flags)
    assert str(error.value) == message


def test_flags_need_the_name_of_their_trainer():
    with pytest.raises(ConfigError) as error:
        load("--beta", "0.1", from_format=None)
    assert str(error.value) == (
        "--beta: flags after -- are those of another trainer. Name it with --from-format, such as --from-format trl; tandem's "
        "own keys are given as key=value."
    )


@pytest.mark.parametrize("value", ["", "[" * 5000, "9" * 5000, "{", "${oc.env:HOME}", "a b", "x=y", "~", "null", "'"])
def test_any_text_is_a_value(value):
    with pytest.raises(ConfigError) as error:
        load(*MODEL, "--optim", value)
    assert "optim" in str(error.value)


@pytest.mark.slow
def test_one_step_from_flags(tmp_path):
    from tandem.cli.main import app

    flags = (
        "--model_name_or_path embedded --dataset_name embedded --per_device_train_batch_size 4 --max_steps 1 --no_bf16"
    )
    given = ["--from-format", "trl", "--", *flags.split(), "--output_dir", str(tmp_path / "run")]
    app(["train", "--quiet", *given], standalone_mode=False)
    (line,) = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").read_text().splitlines()]
    assert (line["split"], line["step"]) == ("train", 1)
