"""Runs the commands that a run prints, exactly as printed."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from models import MODEL
from multimodal import multimodal_folder
from running import SHORT, killed_after

from tandem.cli import main as cli
from tandem.config.load import LoadedConfig, load_config
from tandem.config.sections.policy import Policy
from tandem.embedded.files import TRAIN
from tandem.model.files.tiny import tiny_model
from tandem.report.reporter import Reporter
from tandem.report.verdicts import Verdict
from tandem.training.run import finish
from tandem.training.run.directory import other_run_hint
from tandem.training.run.finish import REAL_MODEL, blamed_keys, using, with_real_model
from tandem.training.trainer import train

# Of a model of one's own, by other names than usual, in a folder with a space.
OWN_KEYS = ["data.default.prompt_key=the question", "data.default.chosen_key=good", "data.default.rejected_key=bad"]


def own_pairs(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in TRAIN.read_text(encoding="utf-8").splitlines()[:24]]
    named = [{"the question": r["prompt"], "good": r["chosen"], "bad": r["rejected"]} for r in rows]
    named = [row for row in named if isinstance(row["the question"], str)]
    (folder / "it's mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named), encoding="utf-8")
    return rf"data.train.data_path='{folder}/it\'s mine.jsonl'"


def next_command(said: str) -> str:
    """The command below "Next" in the output."""
    after = said.split("\nNext: ")[1].splitlines()
    [command] = [line for line in after[1:] if line.strip()]
    assert command.startswith("  ")
    return command.strip()


def trained(capsys, folder: Path, *overrides: str) -> str:
    train(load_config(None, [*SHORT, f"run.dir='{folder}/a run'", *overrides]), Reporter())
    return next_command(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("overrides", "asks"),
    [
        ([], "messages"),
        (["policy.tokenizer.chat_template=null"], "text"),
        (["policy.lora.enabled=true", "export.merge_lora=false"], "messages"),
    ],
    ids=["a chat template", "raw text", "adapters alone"],
)
def test_the_printed_command_makes_the_model_answer(tmp_path, capsys, overrides, asks):
    program, *options, code = shlex.split(trained(capsys, tmp_path, own_pairs(tmp_path), *OWN_KEYS, *overrides))
    assert (program in ("python", sys.executable), options) == (True, ["-P", "-c"])
    exec(code, {})
    [answer] = eval(capsys.readouterr().out.strip().splitlines()[-1])
    text = answer["generated_text"]
    assert isinstance(text, str) is (asks == "text")
    assert len(text) > len("How far is the moon?") if asks == "text" else text[-1]["role"] == "assistant"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen2_5_vl", []),
        ("mistral3", ["policy.tokenizer.chat_template=null"]),
        ("qwen2_5_vl", ["policy.lora.enabled=true", "export.merge_lora=false"]),
    ],
    ids=["a chat template", "raw text", "adapters alone"],
)
def test_the_printed_command_makes_a_multimodal_model_answer_without_warnings(tmp_path, capsys, family, overrides):
    """transformers does not support all of these models in its pipeline for text."""
    base = multimodal_folder(tmp_path / "base", family)
    printed = trained(capsys, tmp_path, own_pairs(tmp_path), *OWN_KEYS, f"policy.model_name={base}", *overrides)
    ran = subprocess.run(shlex.split(printed), capture_output=True, text=True, check=True)
    assert not [line for line in ran.stderr.splitlines() if "[transformers]" in line or "arning" in line]
    assert len(ran.stdout.partition("far is the moon?")[2]) > 40


def test_a_multimodal_model_is_used_on_the_device_that_trained_it():
    template = SimpleNamespace(example=lambda: None)
    source = SimpleNamespace(config=SimpleNamespace(model_type="gemma3"))
    setup = SimpleNamespace(template=template, source=source, device=SimpleNamespace(type="cuda"))
    code = shlex.split(using(Path("m"), setup))[-1]
    assert code.startswith(
        'from transformers import AutoModelForImageTextToText, AutoTokenizer; name = "m"; '
        'model = AutoModelForImageTextToText.from_pretrained(name).to("cuda"); '
    )
    assert 'tokenizer("How far is the moon?", return_tensors="pt").to("cuda"); ' in code


def test_the_command_for_a_model_without_a_template_uses_plain_text(tmp_path, capsys):
    bare = shutil.copytree(MODEL, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    printed = trained(capsys, tmp_path, own_pairs(tmp_path), *OWN_KEYS, f"policy.model_name={bare}")
    assert '("How far is the moon?"' in shlex.split(printed)[-1]


def test_a_better_checkpoint_is_exported_as_printed(tmp_path, capsys, monkeypatch):
    # Rewards of rejected completions fall from step to step, so the first checkpoint has the highest.
    ranked = ["checkpointing.metric_name=val_rewards_rejected_mean", "checkpointing.higher_is_better=true"]
    saved = ["dpo.val_period=2", "dpo.val_at_end=true", "checkpointing.save_period=2", "data.validation_share=0.2"]
    run = tmp_path / "a run"
    given = [*SHORT, own_pairs(tmp_path), *OWN_KEYS, *ranked, *saved, "data.drop_last=false", f"run.dir='{run}'"]
    train(load_config(None, given), Reporter())
    said = capsys.readouterr().out
    assert f"  {run}/model  the aligned model (float32), in the Hugging Face layout: step 4\n" in said
    assert "\nStep 2 is better by validation-default rewards_rejected_mean (-" in said
    [command] = [line.strip() for line in said.splitlines() if " --checkpoint " in line]
    words = shlex.split(command)
    assert words[words.index("export") :] == ["export", str(run), "--checkpoint", "step_2"]
    monkeypatch.setattr("sys.argv", ["tandem", *words[words.index("export") :]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert (run / "exports/step_2/model.safetensors").is_file()


def reread(command: str) -> LoadedConfig:
    words = shlex.split(command)
    words = words[words.index("train") + 1 :]
    file = words.pop(words.index("--config") + 1) if "--config" in words else None
    return load_config(file, [word for word in words if word != "--config"])


def assert_same_but_for_the_model(loaded: LoadedConfig, command: str, batch_size: int = 2) -> None:
    before, after = loaded.config.model_dump(), reread(command).config.model_dump()
    assert after["policy"].pop("model_name") == REAL_MODEL
    assert before["policy"].pop("model_name") == "embedded"
    assert after["policy"].pop("train_global_batch_size") == batch_size
    before["policy"].pop("train_global_batch_size")
    assert after["run"].pop("dir") is None
    before["run"].pop("dir")
    before["checkpointing"]["checkpoint_dir"] = None
    assert after == before


@pytest.mark.parametrize(
    ("more", "batch_size"),
    [
        ([], 2),  # suggested for 24 pairs
        (
            [
                "policy.train_global_batch_size=4",
                "policy.max_total_sequence_length=256",
                "dpo.preference_loss={dpo: 1}",
            ],
            4,
        ),
        (["policy.model_name=embedded", "run.dir=somewhere", "checkpointing.checkpoint_dir=elsewhere"], 2),
    ],
)
def test_the_suggested_run_of_a_real_model_keeps_the_settings(tmp_path, more, batch_size):
    loaded = load_config(None, [own_pairs(tmp_path), *OWN_KEYS, *more])
    assert_same_but_for_the_model(loaded, with_real_model(loaded, tmp_path / "run", 24), batch_size)


def test_the_suggested_run_uses_the_configuration_file_but_another_directory(tmp_path):
    file = tmp_path / "my run.yaml"
    pairs = {"data_path": f"{tmp_path}/pairs.jsonl", "prompt_key": "q"}
    file.write_text(
        json.dumps({"run": {"dir": "x"}, "data": {"train": pairs}, "policy": {"tokenizer": {"chat_template": None}}})
    )
    loaded = load_config(str(file), ["dpo.max_num_steps=3"])
    assert_same_but_for_the_model(loaded, with_real_model(loaded, tmp_path / "run", 24))


@pytest.mark.parametrize("resumed", [False, True])
def test_the_suggested_run_of_a_real_model_omits_settings_of_the_embedded_default(tmp_path, resumed):
    loaded = load_config(None, ["dpo.max_num_steps=3"])
    if resumed:
        (tmp_path / "config.yaml").write_text(loaded.as_yaml())
        loaded = load_config(f"{tmp_path}/config.yaml", ["dpo.max_num_steps=3", f"run.dir={tmp_path}"])
    command = with_real_model(loaded, tmp_path, 370)
    assert shlex.split(command)[-4:] == [
        "train",
        f"policy.model_name={REAL_MODEL}",
        "data.train.data_path=embedded",
        "policy.train_global_batch_size=8",
    ]
    assert reread(command).config.policy.optimizer.kwargs.lr == 5e-6


def test_the_suggested_run_of_a_real_model_omits_settings_of_a_quick_try(tmp_path):
    tried = ["checkpointing.enabled=false", "dpo.val_period=2", "run.seed=1", "dpo.max_num_steps=4"]
    command = with_real_model(load_config(None, [*tried, "dpo.preference_loss=ipo"]), tmp_path / "run", 370)
    assert shlex.split(command)[-5:-3] == ["train", "dpo.preference_loss=ipo"]
    config = reread(with_real_model(load_config(None, [own_pairs(tmp_path), *tried]), tmp_path / "run", 370)).config
    assert (config.checkpointing.enabled, config.dpo.val_period, config.run.seed) == (False, 2, 1)


@pytest.mark.parametrize(("given", "rate"), [([], 1e-4), (["policy.optimizer.kwargs.lr=3e-4"], 3e-4)])
def test_the_suggested_run_of_adapters_has_a_learning_rate_for_adapters(tmp_path, given, rate):
    loaded = load_config(None, ["policy.lora.enabled=true", *given])
    assert reread(with_real_model(loaded, tmp_path / "run", 370)).config.policy.optimizer.kwargs.lr == rate


@pytest.mark.parametrize("where", ["file", "overrides", "overrides of the embedded default"])
def test_the_suggested_run_of_a_real_model_keeps_a_learning_rate_and_batch_size_of_the_user(tmp_path, where):
    (tmp_path / "mine.yaml").write_text(
        '{"policy": {"optimizer": {"kwargs": {"lr": 0.003}}, "train_global_batch_size": 2}}'
    )
    pairs = [] if where == "overrides of the embedded default" else [own_pairs(tmp_path)]
    overrides = ["policy.optimizer.kwargs.lr=0.003", "policy.train_global_batch_size=2"]
    loaded = (
        load_config(str(tmp_path / "mine.yaml"), pairs) if where == "file" else load_config(None, [*pairs, *overrides])
    )
    policy = reread(with_real_model(loaded, tmp_path / "run", 600)).config.policy
    assert (policy.optimizer.kwargs.lr, policy.train_global_batch_size) == (0.003, 2)


def test_the_suggested_run_of_a_real_model_is_in_the_words_of_another_trainer(tmp_path):
    file = tmp_path / "trl.yaml"
    theirs = {"model_name_or_path": "gpt2", "learning_rate": 5e-7, "beta": 0.1, "per_device_train_batch_size": 4}
    file.write_text(json.dumps({**theirs, "output_dir": "out"}))
    loaded = load_config(str(file), ["model_name_or_path=embedded", "data.train=embedded", "output_dir=mine"])
    command = with_real_model(loaded, tmp_path / "run", 370)
    words = shlex.split(command)
    assert words[words.index("train") :] == [
        *("train", "--config", str(file), "data.train=embedded", "run.dir=null", f"model_name_or_path={REAL_MODEL}")
    ]
    config = reread(command).config
    assert (config.policy.model_name, config.policy.optimizer.kwargs.lr, config.run.dir) == (REAL_MODEL, 5e-7, None)
    assert config.policy.train_global_batch_size == loaded.config.policy.train_global_batch_size == 4


def hub_cache(folder: Path) -> Path:
    """A hub cache in which the name of the real model leads to the embedded model."""
    repository = folder / "hub" / f"models--{REAL_MODEL.replace('/', '--')}"
    shutil.copytree(tiny_model(), repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return folder


def shell(command: str, folder: Path, **more: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **more}
    ended = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_chain_of_printed_commands_runs(tmp_path, monkeypatch):
    """A run of the embedded model suggests a run of a real model, which prints how to use the result. All commands work."""
    given = ["dpo.max_num_steps=2", "policy.train_global_batch_size=4", own_pairs(tmp_path), *OWN_KEYS]
    (tmp_path / "my settings.yaml").write_text(json.dumps({"dpo": {"val_at_start": False}, "run": {"dir": "first"}}))
    first = shlex.join([sys.executable, "-m", "tandem", "train", "--config", "my settings.yaml", *given])
    second = next_command(shell(first, tmp_path))
    third = next_command(shell(second, tmp_path, HF_HOME=str(hub_cache(tmp_path / "hub"))))
    assert "generated_text" in shell(third, tmp_path)


@pytest.mark.slow
def test_the_command_printed_by_the_default_run_works(tmp_path):
    second = next_command(shell(f"{sys.executable} -m tandem train dpo.max_num_steps=1", tmp_path))
    third = next_command(shell(second, tmp_path, HF_HOME=str(hub_cache(tmp_path / "hub"))))
    assert "generated_text" in shell(third, tmp_path)


def run_printed(command: str, monkeypatch, capsys) -> str:
    """Run a `tandem train` command that was printed, which must succeed, and return what it prints."""
    words = shlex.split(command)
    monkeypatch.setattr(sys, "argv", ["tandem", *words[words.index("train") :]])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (None, 0)
    return capsys.readouterr().out


def test_an_unfinished_run_resumes_with_the_printed_command(tmp_path, monkeypatch, capsys):
    """The path of the validation set has characters that are special in a shell and in overrides."""
    monkeypatch.chdir(tmp_path)
    saving = [*SHORT, own_pairs(tmp_path), *OWN_KEYS, "checkpointing.save_period=2"]
    with killed_after(3):
        train(load_config(None, saving), Reporter("quiet"))
    shutil.copy(tmp_path / "it's mine.jsonl", tmp_path / "held out, 2.jsonl")
    more = ["data.validation.data_path='held out, 2.jsonl'", "logger.num_val_samples_to_print=0"]
    train(load_config(None, [*saving, *more]), Reporter("quiet"))
    [command] = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert "Done. Everything is in runs/tandem-1" in run_printed(command, monkeypatch, capsys)


@pytest.mark.usefixtures("of_a_command")
def test_the_command_for_a_new_run_sets_everything_that_was_asked_for(tmp_path):
    """Also where a section replaces a value, has other keys than before, or is removed."""
    run = tmp_path / "a run"
    run.mkdir()
    scheduled = "policy.scheduler={name: linear, warmup_ratio: 0.1}"
    stored = load_config(None, [f"run.dir='{run}'", "dpo.preference_loss={dpo: 1, ipo: 1}"])
    (run / "config.yaml").write_text(stored.as_yaml(), encoding="utf-8")
    for changes in (
        ["dpo.max_num_steps=4", scheduled, "dpo.preference_loss={dpo: 1, sppo_hard: 0.5}", "data.validation=null"],
        ["dpo.max_num_steps=4", "policy.scheduler=null", "policy.tokenizer.chat_template_kwargs={a: 'b c'}"],
    ):
        asked = load_config(str(run / "config.yaml"), changes)
        hint = other_run_hint(run, asked)
        assert hint.startswith("Train a new run: ") and hint.endswith(" --fresh")
        command = hint.removeprefix("Train a new run: ").removesuffix(" --fresh")
        assert reread(command).config == asked.config
        (run / "config.yaml").write_text(asked.as_yaml(), encoding="utf-8")


@pytest.mark.parametrize(
    ("places", "run", "new"),
    [
        ([], "runs/tandem-1", "runs/tandem-2"),
        (["run.dir=own", "checkpointing.checkpoint_dir=saved"], "own", "own-1"),
    ],
)
def test_the_command_for_a_shorter_run_works_as_printed(places, run, new, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(load_config(None, [*SHORT, own_pairs(tmp_path), *OWN_KEYS, *places]), Reporter("quiet"))
    monkeypatch.setattr(sys, "argv", ["tandem", "train", "--resume", run, "dpo.max_num_steps=1"])
    with pytest.raises(SystemExit):
        cli.main()
    command = capsys.readouterr().err.split("Train a new run: ")[1]
    assert f"Done. Everything is in {new}" in run_printed(command, monkeypatch, capsys)


RATE = ("policy.optimizer.kwargs.lr", "Train with a larger policy.optimizer.kwargs.lr.")
SCHEDULER = ("policy.scheduler", "The learning rate never left its warm-up: shorten it (policy.scheduler).")


@pytest.mark.parametrize("where", ["file", "overrides", "section"])
@pytest.mark.parametrize(("key", "text"), [RATE, SCHEDULER], ids=["rate", "scheduler"])
def test_the_suggested_run_omits_what_the_verdict_blames(tmp_path, where, key, text):
    slow = "{name: linear, warmup_ratio: 0.9}"
    given = ["policy.optimizer.kwargs.lr=0.003", f"policy.scheduler={slow}", own_pairs(tmp_path)]
    file = None
    if where == "section":
        given[0] = "policy.optimizer.kwargs={lr: 0.003}"
    if where == "file":
        file = tmp_path / "mine.yaml"
        file.write_text(f"policy: {{optimizer: {{kwargs: {{lr: 0.003}}}}, scheduler: {slow}}}\n")
        given = given[2:]
    blamed = blamed_keys([Verdict("hardly_trained", "train", text)])
    assert blamed == {key}
    loaded = load_config(file and str(file), given)
    policy = reread(with_real_model(loaded, tmp_path / "run", 24, blamed)).config.policy
    is_kept = policy.scheduler == loaded.config.policy.scheduler
    assert (policy.optimizer.kwargs.lr, is_kept) == ((5e-6, True) if key == RATE[0] else (0.003, False))
    assert key == RATE[0] or policy.scheduler == (None if where == "file" else Policy().scheduler)


def test_a_run_says_which_of_its_settings_the_next_one_changes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finish, "judge", lambda *_: [Verdict("accuracy_flat", "train", f"{RATE[1]} {SCHEDULER[1]}")])
    given = [*SHORT, f"run.dir={tmp_path}/run", "policy.optimizer.kwargs.lr=1e-9"]
    given = [one for one in given if "scheduler" not in one and not one.startswith(("policy.model_name", "data."))]
    train(load_config(None, given), Reporter())
    said = capsys.readouterr().out
    assert (
        "Next: a real model, with tandem's policy.optimizer.kwargs.lr instead of yours (see the verdict), then your own pairs"
    ) in said
    assert "lr=" not in said.partition("Next:")[2]


@pytest.mark.parametrize("name", ["diverged", "only_hurt"])
def test_nothing_is_suggested_after_a_run_that_made_the_model_worse(tmp_path, capsys, monkeypatch, name):
    """The suggested run would use the same learning rate."""
    monkeypatch.setattr(finish, "judge", lambda *_: [Verdict(name, "train", "Lower the learning rate.")])
    train(load_config(None, [*SHORT, f"run.dir={tmp_path}/run", "dpo.max_num_steps=1"]), Reporter())
    said = capsys.readouterr().out
    assert "train: Lower the learning rate." in said
    assert "Next:" not in said
