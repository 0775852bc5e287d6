"""What `tandem eval` is asked for: exact messages of wrong arguments, before torch is imported."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import yaml

from tandem.config.load import load_config
from tandem.errors import CheckpointError, ConfigError, DataError
from tandem.evaluation.request import check_request
from tandem.exporting.request import RECORD
from tandem.terminal.arguments import command_words
from tandem.terminal.commands import tandem_command
from tandem.training.run.lock import locked
from tandem.user_code import RefusedCodeError

pytestmark = pytest.mark.usefixtures("of_a_command")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "Hi", "chosen": "yes", "rejected": "no"}) + "\n")
    return str(file)


@pytest.fixture
def run(tmp_path):
    """A run directory as training leaves it, without checkpoints."""
    folder = tmp_path / "run"
    (folder / "model").mkdir(parents=True)
    (folder / "rejects.jsonl").touch()
    (folder / "config.yaml").write_text(load_config(None, ["dpo.reference_policy_kl_penalty=0.3"]).as_yaml())
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").touch()
    return folder


def refused(*arguments, error=ConfigError, **options):
    with pytest.raises(error) as caught:
        check_request(*arguments, **options)
    return str(caught.value)


def test_a_run_means_its_model_with_its_own_reference_and_loss(run, data):
    subject = check_request(str(run), [data]).subject
    assert subject.model.policy.model_name == str(run / "model")
    assert subject.reference.policy.model_name == "embedded"
    assert subject.dpo.reference_policy_kl_penalty == 0.3
    assert check_request(str(run), [data], beta=0.5).subject.dpo.reference_policy_kl_penalty == 0.5


def test_a_run_whose_loss_changed_is_evaluated_with_another(run, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "def mine(pairs, *, beta):\n    return -beta * pairs.ratios.margin\n"
    (tmp_path / "mine.py").write_text(code)
    (run / "config.yaml").write_text(load_config(None, ["dpo.preference_loss=mine.py:mine"]).as_yaml())
    (tmp_path / "mine.py").write_text(f"# a comment\n{code}")
    assert check_request(str(run), [data], allow_code=True).subject.dpo.preference_loss == "mine.py:mine"
    (tmp_path / "mine.py").write_text(code.replace("-beta", "-2 * beta"))
    message = refused(str(run), [data], allow_code=True)
    assert message.endswith(
        "Undo the change, or start a new run. To evaluate the run with another loss, add dpo.preference_loss=dpo."
    )
    assert check_request(str(run), [data], overrides=["dpo.preference_loss=dpo"]).subject.dpo.preference_loss == "dpo"


@pytest.fixture
def coded(run, tmp_path, monkeypatch):
    """The run, trained with a format function; and a file that only this function reads."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def mine(row):\n    return {'prompt': row['ask'], 'chosen': row['good'], 'rejected': row['bad']}\n"
    )
    (tmp_path / "own.jsonl").write_text(json.dumps({"ask": "Hi", "good": "yes", "bad": "no"}) + "\n")
    (tmp_path / "train.jsonl").write_text((tmp_path / "own.jsonl").read_text())
    keys = ["data.train.data_path=train.jsonl", "data.train.dataset_name=mine.py:mine"]
    (run / "config.yaml").write_text(load_config(None, keys).as_yaml())
    (tmp_path / "mine.py").write_text("raise AssertionError('must not be run')")
    return run, "own.jsonl"


def test_code_is_asked_for_only_where_a_file_needs_the_format_of_the_run(coded, data):
    run, own = coded
    assert check_request(str(run), [data]).subject.run == run
    assert check_request("embedded", [data], against=str(run)).against.run == run
    message = (
        f"{own}:1: no known format fits this row, and the run's own format may not be run. "
        f"{run}/config.yaml: data.train.dataset_name = mine.py:mine names Python code, which would be run. If you trust it, add "
        "--allow-code"
    )
    assert refused(str(run), [own], error=RefusedCodeError) == f"{message}."
    assert refused("embedded", [data, own], against=str(run), error=RefusedCodeError) == f"{message}."
    with command_words(["eval", str(run), own]):
        command = tandem_command("eval", str(run), own, "--allow-code")
        assert refused(str(run), [own], error=RefusedCodeError) == f"{message}: {command}"
    assert "must not be run" in refused(str(run), [own], allow_code=True)


def test_validation_sets_that_need_code_are_refused_without_permission(coded):
    run, own = coded
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["validation"] = {"data_path": own, "dataset_name": "mine.py:mine"}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert "data.validation.dataset_name = mine.py:mine names" in refused(str(run), error=RefusedCodeError)
    tree["data"] |= {"default": {"dataset_name": "mine.py:mine"}, "validation": None}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    overrides = ["data.default.prompt_key=ask"]
    assert "names Python code" in refused(str(run), [own], overrides=overrides, error=RefusedCodeError)


def test_a_run_given_as_data_is_compared_with_its_code_where_that_is_needed(coded, data, tmp_path):
    other, own = coded
    run = tmp_path / "plain"
    shutil.copytree(other, run)
    (run / "model" / "model.safetensors").write_bytes(b"others")
    (run / "config.yaml").write_text(load_config(None, []).as_yaml())
    for files, more in (([], []), ([data], []), ([own], ["--allow-code"])):
        command = tandem_command("eval", str(run), *files, "--against", str(other), *more)
        assert refused(str(run), [str(other), *files]).endswith(f"To compare {run} with it: {command}")
    (tmp_path / "mine.py").write_text("def mine(pairs, *, beta):\n    return -beta * pairs.ratios.margin\n")
    (other / "config.yaml").write_text(load_config(None, ["dpo.preference_loss=mine.py:mine"]).as_yaml())
    for model, named in ((run, other), (other, run)):  # the loss of each is needed on any file
        command = tandem_command("eval", str(model), "--against", str(named), "--allow-code")
        assert refused(str(model), [str(named)]).endswith(f"To compare {model} with it: {command}")


def test_a_run_without_data_is_measured_on_its_validation_sets(run):
    (only,) = check_request(str(run)).data
    assert (only.name, only.path.endswith("embedded/validation.jsonl")) == ("default", True)


def test_a_run_with_a_loss_without_reference_has_none(run, data):
    loaded = load_config(None, ["dpo.preference_loss=simpo"])
    (run / "config.yaml").write_text(loaded.as_yaml())
    assert check_request(str(run), [data]).subject.reference is None
    with_reference = check_request(str(run), [data], reference="embedded").subject
    assert (with_reference.reference.name, with_reference.dpo.preference_loss) == ("embedded", "dpo")


def test_an_adapter_is_loaded_on_its_base_model(tmp_path, data):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "embedded"}))
    policy = check_request(str(folder), [data]).subject.model.policy
    assert (policy.model_name, policy.lora.adapter) == ("embedded", str(folder))
    (folder / "adapter_config.json").write_text("{}")
    assert refused(str(folder), [data]) == (
        f"MODEL {folder}: an adapter whose adapter_config.json does not name its base model. Merge it into its base model, "
        "and give that folder."
    )


def test_a_run_of_adapters_alone_is_loaded_on_its_start_model(run, data):
    (run / "config.yaml").write_text(
        load_config(None, ["policy.lora.enabled=true", "export.merge_lora=false"]).as_yaml()
    )
    (run / "model" / "config.json").unlink()
    (run / "model" / "adapter_config.json").write_text("{}")
    subject = check_request(str(run), [data]).subject
    assert (subject.model.policy.model_name, subject.model.policy.lora.adapter) == ("embedded", str(run / "model"))
    assert not subject.reference.policy.lora.enabled  # new adapters change nothing


def test_all_pairs_are_measured_unless_asked_otherwise(data):
    assert check_request("embedded", [data]).subject.config.data.pairing == "all"
    asked = check_request("embedded", [data], overrides=["data.pairing=best_worst"])
    assert asked.subject.config.data.pairing == "best_worst"


def test_a_run_without_a_model_is_refused(run, data):
    (run / "model" / "model.safetensors").unlink()
    assert refused(str(run), [data], error=CheckpointError) == (
        f"MODEL {run}: a run that has no model yet: {run}/model is written when the run is finished. Finish it with "
        f"{tandem_command('train', '--resume', str(run))}."
    )
    with locked(run):
        assert refused(str(run), [data], error=CheckpointError) == (
            f"MODEL {run}: a run that has no model yet: {run}/model is written when the run is finished. It is being trained by "
            f"process {os.getpid()}. Wait until it is finished."
        )


def test_a_run_that_wrote_only_its_configuration_is_a_run_without_a_model(tmp_path, data):
    partial = tmp_path / "partial"
    partial.mkdir()
    (partial / "config.yaml").write_text("dpo: {max_num_steps: 3}\n")
    for argument, options in (
        ("MODEL", {"model": str(partial)}),
        ("--against", {"model": "embedded", "against": str(partial)}),
    ):
        assert refused(data=[data], error=CheckpointError, **options) == (
            f"{argument} {partial}: a run that has no model yet: {partial}/model is written when the run is finished. Finish it "
            f"with {tandem_command('train', '--resume', str(partial))}."
        )


def test_a_folder_of_runs_names_one_of_them(run, tmp_path, data):
    expected = f"{tmp_path}: it holds runs: name one of its runs, such as {run}."
    assert refused(str(tmp_path), [data]) == f"MODEL {expected}"
    assert refused("embedded", [data], against=str(tmp_path)) == f"--against {expected}"
    (tmp_path / "sweep.json").touch()
    assert refused(str(tmp_path), [data]).startswith(f"MODEL {tmp_path}: it is a sweep: name one of its runs, such as ")


def test_a_folder_of_checkpoints_names_its_run_and_the_command_with_it(run, data, monkeypatch):
    folder = run / "checkpoints"
    (folder / "step_5/tensors").mkdir(parents=True)
    for name in ("state.json", "config.yaml"):
        (folder / "step_5" / name).touch()
    expected = f"{folder}: it holds the checkpoints of {run}: name that run, or one of them, such as {folder}/step_5."
    assert refused(str(folder), [data]) == f"MODEL {expected} Did you mean {run}?"
    monkeypatch.setattr("sys.argv", ["tandem", "eval", "embedded", data, "--against", str(folder)])
    assert refused("embedded", [data], against=str(folder)) == (
        f"--against {expected} The command is then: {tandem_command('eval', 'embedded', data, '--against', str(run))}"
    )


def test_folders_and_files_that_are_no_models_are_refused(tmp_path, data):
    assert refused(str(tmp_path), [data]) == (
        f"MODEL {tmp_path}: {tmp_path} holds no config.json, so it is not a model. Give a model folder, a hub name, or a run "
        "directory."
    )
    assert refused(data, [data]) == f"MODEL {data}: a file, not a model folder or a run. Give the folder."
    missing = "no such directory. Give a model folder, a hub name, or a run directory."
    assert refused("./nope", [data]) == f"MODEL ./nope: {missing}"
    assert refused("embedded", [data], reference="./nope") == f"--reference ./nope: {missing}"
    assert refused("embedded", [data], against="./nope") == f"--against ./nope: {missing}"


def test_a_name_below_a_folder_that_exists_is_not_looked_for_on_the_hub(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert refused("runs/nothing", [data]) == (
        "MODEL runs/nothing: no such directory. Give a model folder, a hub name, or a run directory."
    )


def test_missing_data_is_refused(run, data, tmp_path):
    assert (
        refused("embedded")
        == "MODEL embedded: not a run, so give DATA: one or more files of preference pairs, or embedded."
    )
    missing = f"{tmp_path}/nope.jsonl"
    message = f"{missing}: no such file or folder, and not the name of a hub dataset (org/name)."
    assert refused("embedded", [missing], error=DataError) == message
    tree = yaml.safe_load((run / "config.yaml").read_text())
    tree["data"]["train"] = data
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    assert refused(str(run)) == f"MODEL {run}: the run has no validation set. Give DATA: a file of preference pairs."


def test_options_without_an_effect_are_refused(data, tmp_path):
    assert refused("embedded", [data], beta=0.5) == (
        "--beta 0.5 scales implicit rewards, which need a reference. Add --reference MODEL."
    )
    assert refused("embedded", [data], beta=-1.0) == "--beta -1.0: not a positive number."
    assert refused("embedded", [data], limit=3) == "--limit 3 has no effect without --lm-eval TASKS. Leave it out."
    assert refused("embedded", [data], include_path=tmp_path) == (
        f"--include-path {tmp_path} has no effect without --lm-eval TASKS. Leave it out."
    )
    assert refused("embedded", [], lm_eval=["x"], by="source") == (
        "--per-pair and --by describe pairs, but no DATA is given. Add a data file."
    )
    assert refused("embedded", [data], lm_eval=["x"], include_path=tmp_path / "nope") == (
        f"--include-path {tmp_path}/nope: no such directory. Give a folder with task files (.yaml)."
    )


def test_keys_that_arguments_give_are_refused(data):
    assert refused("embedded", [data], overrides=["data.train.prompt_key=q"]) == (
        "data.train.prompt_key=q: MODEL, DATA, --reference and --against give the models and the data. Say how to read the data "
        "with data.default.KEY=VALUE."
    )
    assert refused("embedded", [data], overrides=["policy.model_name=x"]) == (
        "policy.model_name=x: MODEL, DATA, --reference and --against give the models and the data."
    )
    unused = [
        "policy.optimizer.kwargs.lr=1",
        "dpo.max_num_steps=5",
        "~dpo.val_period",
        "policy.train_global_batch_size=4",
        "data.validation_share=0.1",
        "data.shuffle=false",
        "data.default.weight=2",
        "policy.parallel.shard=2",
        "cluster.num_nodes=2",
    ]
    for override in unused:
        assert refused("embedded", [data], overrides=[override]) == (
            f"{override}: this key has no effect on an evaluation. Leave it out."
        )


def test_keys_without_an_effect_on_these_models_and_sets_are_refused(run, data, tmp_path):
    no_effect = "this key has no effect on"
    assert refused(str(run), [], overrides=["data.default.prompt_key=q"]) == (
        f"data.default.prompt_key=q: {no_effect} the validation sets of the run, which are read as in training. Give DATA, or "
        "leave it out."
    )
    assert check_request(str(run), [data], overrides=["data.default.prompt_key=q"]).subject.sets_fields
    assert refused(str(run), [data], overrides=["data.duplicates=drop"]) == (
        f"data.duplicates=drop: {no_effect} an evaluation, except of prepared data. Leave it out."
    )
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    for name in ("manifest.json", "tokens.arrow"):
        (prepared / name).touch()
    assert check_request(str(run), [str(prepared)], overrides=["data.duplicates=drop"])
    no_run = "keys of dpo have an effect on the loss of a run, and no run is evaluated."
    for one, hint in (
        ("dpo.preference_loss=ipo", "Leave it out."),
        ("dpo.reference_policy_kl_penalty=1", "To scale the rewards, use --beta X."),
    ):
        message = refused("embedded", [data], reference="embedded", overrides=[one])
        assert message == f"{one}: {no_run} {hint}"
    assert check_request("embedded", [data], against=str(run), overrides=["dpo.preference_loss=ipo"]).against.run == run


def test_a_field_that_no_row_has_is_refused_with_the_fields_of_the_first_row(data, tmp_path):
    begin = f"--by domain: no row of {data} has a value for this field. Give a field of the rows, such as those of the first row"
    assert refused("embedded", [data], by="domain", error=DataError) == f"{begin}: prompt, chosen, rejected."
    row = {"prompt": "Hi", "chosen": "yes", "rejected": "no"}
    for more, fields in [
        ({"domain": ""}, "prompt, chosen, rejected"),
        ({f"f{i}": i for i in range(20)}, "prompt, chosen, rejected, f0, f1, f2, f3, f4, f5, f6, f7, f8 and 11 more"),
    ]:
        (tmp_path / "pairs.jsonl").write_text(json.dumps(row | more) + "\n" + json.dumps(row) + "\n")
        assert refused("embedded", [data], by="domain", error=DataError) == f"{begin}: {fields}."
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"domain": 0}) + "\n")
    assert check_request("embedded", [data], by="domain").by == "domain"


def test_beta_is_given_once(run, data):
    for given in ("dpo.reference_policy_kl_penalty=0.5", {"dpo": {"reference_policy_kl_penalty": 0.5}}):
        text = given if isinstance(given, str) else "dpo.reference_policy_kl_penalty"
        assert refused(str(run), [data], beta=0.2, overrides=[given]) == (
            f"{text}: --beta 0.2 gives this value too. Leave out one of them."
        )
        found = check_request(str(run), [data], overrides=[given])
        assert found.subject.dpo.reference_policy_kl_penalty == 0.5


def test_a_run_or_model_given_as_data_is_compared_with(run, data, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    begin = f"DATA {other}: a run, not data."
    assert refused(str(run), [str(other)]) == (
        f"{begin} To compare {run} with it: {tandem_command('eval', str(run), '--against', str(other))}"
    )
    message = refused(
        *(str(run), [str(other), data]),
        beta=0.5,
        lm_eval=["a", "b"],
        allow_code=True,
        overrides=["policy.precision=float32"],
    )
    words = (
        data,
        "policy.precision=float32",
        "--against",
        str(other),
        "--beta",
        "0.5",
        "--lm-eval",
        "a,b",
        "--allow-code",
    )
    assert message == f"{begin} To compare {run} with it: {tandem_command('eval', str(run), *words)}"
    (other / "model" / "model.safetensors").touch()
    model = f"{other}/model"
    command = tandem_command("eval", "embedded", "DATA", "--against", model)
    assert refused("embedded", [model]) == (
        f"DATA {model}: a model, not data. With DATA, a file of preference pairs, compare embedded with it: {command}"
    )
    assert refused(str(run), [str(other)], against="embedded") == (
        f"{begin} Leave it out: --against embedded names the model to compare with."
    )


def test_a_model_is_not_compared_with_itself(run, data, tmp_path):
    (run / "model" / "model.safetensors").write_bytes(b"one")
    export = shutil.copytree(run / "model", run / "exports" / "step_22")  # of the same step
    (export / "README.md").write_text("Made by tandem export.")
    (export / RECORD).write_text(json.dumps({"step": 22}))
    (tmp_path / "link").symlink_to(run)
    for model, other in [
        ("embedded", "embedded"),
        (str(run), str(run)),
        (str(run), f"{run}/model"),
        (f"{run}/model", str(run)),
        (str(run), str(tmp_path / "link")),
        (str(run), str(export)),
        (str(export), f"{run}/model"),
    ]:
        assert refused(model, [data], against=other) == (
            f"--against {other}: the same weights as MODEL {model}, so there is nothing to compare. Give another model or run."
        )
    copy = shutil.copytree(run, tmp_path / "copy")
    for name, content in {"model.safetensors": b"two", "config.json": b'{"rope_theta": 1}'}.items():
        shutil.copytree(run / "model", copy / "model", dirs_exist_ok=True)
        (copy / "model" / name).write_bytes(content)
        assert check_request(str(run), [data], against=str(copy)).against.run == copy


def test_adapters_are_compared_by_their_own_folder(run, data, tmp_path):
    (run / "config.yaml").write_text(
        load_config(None, ["policy.lora.enabled=true", "export.merge_lora=false"]).as_yaml()
    )
    (run / "model" / "config.json").unlink()
    (run / "model" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "embedded"}))
    copy = shutil.copytree(run, tmp_path / "copy")
    (copy / "model" / "model.safetensors").write_bytes(b"others")
    assert "the same weights as" in refused(str(run), [data], against=f"{run}/model")
    assert check_request(str(run), [data], against=str(copy)).against.run == copy  # another adapter of the same base
    assert check_request(str(run), [data], against="embedded").against.run is None


def test_a_per_pair_file_that_cannot_be_written_is_refused(data, tmp_path):
    assert refused("embedded", [data], per_pair=tmp_path) == (
        f"--per-pair {tmp_path}: a directory. Give the name of a file."
    )


def test_requests_are_checked_without_torch():
    code = "import sys, tandem.evaluation.request, tandem.cli.eval; print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "False\n"
