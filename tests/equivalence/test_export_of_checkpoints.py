"""`tandem export`: any checkpoint of a run = what the run exports, bit for bit; and every way in which it is refused."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import MODEL, bfloat16_start
from running import few_pairs, largest_difference, metrics_of, short_run, weights_of
from safetensors.torch import load_file
from together import run_together
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.cli import main as cli
from tandem.errors import CheckpointError, ConfigError, MachineError
from tandem.evaluation.evaluate import evaluate
from tandem.exporting import cached
from tandem.exporting.checkpoint import export
from tandem.exporting.request import request_export
from tandem.generation.generate import generate
from tandem.generation.records import Sampling
from tandem.report.reporter import Reporter
from tandem.storage.cache import write_manifest
from tandem.terminal.console import SafeConsole
from tandem.training.run.lock import locked

pytestmark = pytest.mark.usefixtures("of_a_command")

SAVING = ["checkpointing.save_period=2", "dpo.val_period=2", "dpo.val_at_end=true", "dpo.val_batches=2"]


def settings(folder: Path) -> list[str]:
    return [*SAVING, few_pairs(folder, 20), "data.validation_share=0.2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished run of bfloat16 weights, with checkpoints of steps 2 and 4. Tests must not change it."""
    folder = tmp_path_factory.mktemp("made")
    return short_run(folder / "run", *settings(folder), f"policy.model_name={bfloat16_start(folder / 'base')}")


@pytest.fixture
def run(made, tmp_path):
    """A copy of the run that a test may change."""
    return shutil.copytree(made, tmp_path / "run", symlinks=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tandem(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def refused(*given, **options) -> str:
    with pytest.raises((CheckpointError, ConfigError)) as error:
        request_export(*given, **options)
    return str(error.value)


# --- the export ---


def test_the_latest_checkpoint_is_exported_as_the_run_exported_it_and_the_run_is_not_changed(made, tmp_path):
    before = contents(made)
    done = export(made, checkpoint="latest", out=tmp_path / "out")
    assert contents(made) == before
    assert largest_difference(load_file(done.folder / "model.safetensors"), weights_of(made)) == 0.0
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md"):
        assert (done.folder / name).read_bytes() == (made / "model" / name).read_bytes(), name
    assert (done.step, done.form, done.dtype, done.not_measured) == (4, "model", "bfloat16", None)
    recorded = metrics_of(made, "exported-default")[-1]
    assert done.exported["validation-default"]["loss"] == recorded["loss"]
    assert done.in_memory["validation-default"]["loss"] == metrics_of(made, "validation-default")[-1]["loss"]


def test_an_earlier_checkpoint_goes_to_a_folder_of_its_step_in_the_run(run, monkeypatch, capsys):
    shutil.rmtree(run / "checkpoints/step_4")  # not needed
    code, out, _ = tandem(monkeypatch, capsys, "export", str(run / "checkpoints/step_2"), "--json")
    found = json.loads(out)
    folder = run / "exports/step_2"
    assert (code, found["folder"], found["step"]) == (0, str(folder), 2)
    assert "step 2\n" in (folder / "README.md").read_text().split("#", 1)[1]
    two = metrics_of(run, "validation-default")[0]
    assert found["in_memory"]["validation-default"]["loss"] == two["loss"]
    code, out, _ = tandem(monkeypatch, capsys, "export", str(run), "--checkpoint", "step_2")
    assert (code, f"{folder} holds this export already.\n" in out) == (0, True)


def test_an_export_without_the_data_is_not_measured_and_says_so(tmp_path, monkeypatch, capsys):
    run = short_run(tmp_path / "run", *settings(tmp_path / "data"), "checkpointing.save_optimizer=false")
    shutil.rmtree(tmp_path / "data")
    options = ["--max-shard-size", "100kb", "--push-to-hub", "me/model", "--dry-run"]
    code, out, _ = tandem(monkeypatch, capsys, "export", str(run), *options)
    why = f"{tmp_path}/data/few.jsonl: no such file or folder, and not the name of a hub dataset (org/name)."
    assert (code, f"warning: the export was loaded back, but not measured: {why}" in " ".join(out.split())) == (0, True)
    folder = run / "exports/step_4"
    card = (folder / "README.md").read_text()
    assert "The exported weights were not measured: the run's data could not be read.\n" in card
    for name in ("README.md", "tandem_export.json"):
        assert str(tmp_path) not in (folder / name).read_text(), name
    assert "| train | few.jsonl | 16 | " in card
    # Several files, as transformers and vLLM read them: an index and numbered shards.
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 1
    assert shards == sorted(set(index["weight_map"].values()))
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["LlamaForCausalLM"], "float32")
    model, trained = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(run / "model")
    assert largest_difference(model.state_dict(), trained.state_dict()) == 0.0
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert "Would be uploaded to me/model, without --dry-run" in out
    assert "README.md" in out.split("Would be uploaded")[1]
    assert "tokenizer.json" in out.split("Would be uploaded")[1]


def test_adapters_are_exported_alone_and_merged(tmp_path, monkeypatch, capsys):
    run = short_run(tmp_path / "run", *settings(tmp_path), "policy.lora.enabled=true", "policy.lora.dim=4")
    merged = export(run, out=tmp_path / "merged")
    assert (merged.folder / "model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
    alone = export(run, form="adapter")
    assert (alone.folder, alone.form, alone.dtype) == (run / "exports/step_4-adapter", "adapter", "float32")
    assert alone.exported == alone.in_memory
    # As vLLM reads adapters.
    described = json.loads((alone.folder / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["bias"], described["modules_to_save"]) == (
        "LORA",
        4,
        "none",
        None,
    )
    names = set(load_file(alone.folder / "adapter_model.safetensors"))
    assert all(
        name.startswith("base_model.model.") and name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names
    )
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    joined = PeftModel.from_pretrained(base, alone.folder).merge_and_unload()
    whole = AutoModelForCausalLM.from_pretrained(merged.folder, dtype=torch.float32)
    assert largest_difference(joined.state_dict(), whole.state_dict()) < 1e-6
    assert (
        refused(run, form="adapter", gguf=True) == "--gguf converts a complete model, not adapters alone. Add --merged."
    )

    # An adapter that is uploaded names its base model, whether it is written now or was before; --quiet lists the files too.
    push = ("--push-to-hub", "me/model", "--dry-run", "--quiet", "--no-measure")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for out in ("run/exports/step_4-adapter", "new"):
        code, printed, _ = tandem(
            monkeypatch, capsys, "export", "run/checkpoints/latest", "--adapter", "--out", out, *push
        )
        assert code == 0
        assert printed.startswith(
            f"warning: adapter_config.json names the base model by its folder, {MODEL}: others cannot"
        )
        assert f"\n{out}  the aligned adapter (float32): step 4\nWould be uploaded to me/model" in printed
        assert "adapter_model.safetensors" in printed
    assert tandem(monkeypatch, capsys, "export", "run/checkpoints/latest", "--adapter", "--quiet")[1] == (
        "run/exports/step_4-adapter  the aligned adapter (float32): step 4\n"
    )
    monkeypatch.chdir(run / "checkpoints")
    assert tandem(monkeypatch, capsys, "export", "latest", "--adapter", "--quiet")[0] == 0


def test_quantised_adapters_are_exported_without_a_gpu_but_not_merged(tmp_path):
    run = short_run(tmp_path / "run", *settings(tmp_path), "policy.lora.enabled=true", "policy.lora.dim=4")
    for file in (run / "config.yaml", run / "checkpoints/step_4/config.yaml"):
        file.write_text(file.read_text().replace("quantization: null", "quantization: nf4"))
    place = run / "checkpoints/step_4"
    state = json.loads((place / "state.json").read_text())
    from tandem.storage.cache import fingerprint

    state["fingerprints"]["start model"] = fingerprint(state["fingerprints"]["start model"], None, "nf4")
    (place / "state.json").write_text(json.dumps(state))
    (place / "manifest.json").unlink()
    write_manifest(place, format_version=5)
    done = export(run, form="adapter")
    assert done.not_measured == "policy.lora.quantization = nf4 needs a CUDA device."
    with pytest.raises(MachineError) as error:
        export(run, out=tmp_path / "merged")
    assert str(error.value) == (
        "policy.lora.quantization = nf4: merging needs the quantised weights, which need a CUDA device, and this machine has "
        "none. Export the adapters with --adapter, or merge on a machine with a GPU."
    )
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
def test_one_process_exports_what_two_ranks_trained(tmp_path):
    from running import SHORT

    run_together(2, [[*SHORT, *settings(tmp_path), f"run.dir={tmp_path}/run"]], tmp_path)
    done = export(tmp_path / "run")
    assert largest_difference(load_file(done.folder / "model.safetensors"), weights_of(tmp_path / "run")) == 0.0


def test_weights_of_few_bits_are_exported_bit_for_bit(tmp_path):
    few = [
        "policy.weights=bfloat16_stochastic",
        "policy.precision=bfloat16",
        "dpo.val_at_end=false",
        "dpo.val_period=0",
    ]
    run = short_run(tmp_path / "run", *settings(tmp_path), *few)
    console = SafeConsole(file=io.StringIO(), force_terminal=True, width=120)
    done = export(run, measured=False, reporter=Reporter(console=console))
    drawn = console.file.getvalue()
    for stage in ("verifying the checkpoint", "loading the start model", "loading back and measuring"):
        assert stage in drawn, stage
    assert "warning" not in drawn  # it was asked for
    assert largest_difference(load_file(done.folder / "model.safetensors"), weights_of(run)) == 0.0
    assert done.not_measured == "--no-measure was given."


def test_the_model_is_converted_by_llama_cpp(made, tmp_path, monkeypatch, capsys):
    converter = tmp_path / "convert_hf_to_gguf.py"
    converter.write_text("import sys; open(sys.argv[3], 'w').write('GGUF')")
    options = ["--gguf", "--llama-cpp", str(converter), "--no-measure", "--out", str(tmp_path / "out")]
    code, out, _ = tandem(monkeypatch, capsys, "export", str(made), *options)
    assert (code, (tmp_path / "out/model-bf16.gguf").read_text()) == (0, "GGUF")
    assert f"{tmp_path}/out/model-bf16.gguf  the same model for llama.cpp" in out


# --- a run and its checkpoints as models ---


@pytest.fixture
def in_this_process(monkeypatch, capsys):
    """Run the child process that exports a checkpoint in this process, which has imported everything already."""

    def run(command, **_):
        arguments = command[command.index("export") :]
        code, out, err = tandem(monkeypatch, capsys, *arguments)
        return subprocess.CompletedProcess(command, code, out, err)

    monkeypatch.setattr(cached.subprocess, "run", run)


def assert_trains_from_a_checkpoint(made, folder):
    data = [few_pairs(folder, 20), "dpo.max_num_steps=1"]
    place = made / "checkpoints/latest"
    from_checkpoint = short_run(folder / "a", *data, f"policy.model_name={place}", f"reference.model={place}")
    from_run = short_run(folder / "b", *data, f"policy.model_name={made}", f"reference.model={made}")
    assert largest_difference(weights_of(from_checkpoint), weights_of(from_run)) == 0.0
    assert f"| base model | {made.name} |" in (from_run / "model/README.md").read_text()
    assert f"| base model | {made.name}, step_4 |" in (from_checkpoint / "model/README.md").read_text()


def test_a_checkpoint_can_be_trained_from_and_be_the_reference(made, tmp_path, in_this_process):
    assert_trains_from_a_checkpoint(made, tmp_path)


@pytest.mark.slow
def test_a_checkpoint_is_exported_by_a_separate_process(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    assert_trains_from_a_checkpoint(run, tmp_path)


def test_a_damaged_checkpoint_cannot_be_trained_from(run, tmp_path, in_this_process):
    place = run / "checkpoints/step_2"
    file = next((place / "tensors").iterdir())
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as error:
        short_run(tmp_path / "a", few_pairs(tmp_path, 20), f"policy.model_name={place}")
    assert str(error.value) == (
        f"policy.model_name = {place}: this checkpoint cannot be exported: {file} does not match its SHA-256 in the manifest: it "
        "was changed or cut off. Nothing was exported. Choose another --checkpoint: step_4."
    )


def test_a_checkpoint_is_evaluated_as_the_model_that_the_run_exported(made, in_this_process):
    of_run = evaluate(str(made), ["embedded"])
    of_checkpoint = evaluate(str(made / "checkpoints/latest"), ["embedded"])
    assert (of_checkpoint.total, of_checkpoint.reference) == (of_run.total, of_run.reference)
    earlier = evaluate(str(made / "checkpoints/step_2"), ["embedded"], against=str(made / "checkpoints/latest"))
    assert earlier.total is not None and of_run.total is not None
    assert earlier.total.rewards_margin != of_run.total.rewards_margin


def test_a_checkpoint_generates_as_the_model_that_the_run_exported(made, in_this_process):
    sampling = Sampling(max_new_tokens=4)
    texts = [
        [record["completions"] for record in generate(str(model), ["Hi"], sampling=sampling).records]
        for model in (made, made / "checkpoints/latest")
    ]
    assert texts[0] == texts[1]


# --- what is refused ---


def test_folders_that_are_no_run_are_refused(made, tmp_path):
    instead = "Give the directory of a run, or one of its checkpoints."
    assert refused(tmp_path) == f"{tmp_path}: it has no config.yaml, so it is not a run. {instead}"
    with pytest.raises(ConfigError):  # exit code 2, as for a directory that does not exist
        export(str(tmp_path))
    assert refused(tmp_path / "x") == f"{tmp_path}/x: there is no such directory. {instead}"
    assert refused(made / "config.yaml") == f"{made}/config.yaml: a file, not a directory. {instead}"
    assert (
        refused(made / "model") == f"{made}/model: it holds a model of the run {made}, not a run. Did you mean {made}?"
    )


def test_a_run_without_checkpoints_is_refused(run):
    shutil.rmtree(run / "checkpoints")
    nothing = f"{run}: no checkpoints in {run}/checkpoints, so there is nothing to export."
    assert refused(run) == f"{nothing} The model that it exported is in {run}/model."
    shutil.rmtree(run / "model")
    assert refused(run).startswith(f"{nothing} Train it first: ")
    assert refused(run).endswith(f"tandem train --resume {run}")
    with locked(run):
        assert refused(run) == f"{nothing} It is being trained by process {os.getpid()}."


def test_an_unknown_step_is_refused_with_those_that_exist(made):
    for asked in ("step_3", "3", "first"):
        assert refused(made, checkpoint=asked) == (
            f"--checkpoint {asked}: {made}/checkpoints has no such checkpoint. Use best, latest, or one of these: step_2, step_4."
        )
    place = made / "checkpoints/step_2"
    assert (
        refused(place, checkpoint="best")
        == f"--checkpoint best: {place} is a checkpoint itself. Leave out --checkpoint."
    )


def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(run, monkeypatch, capsys):
    file = next((run / "checkpoints/step_4/tensors").iterdir())
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    code, _, err = tandem(monkeypatch, capsys, "export", str(run), "--quiet")
    assert (code, err) == (
        4,
        f"tandem: error: {file} does not match its SHA-256 in the manifest: it was changed or cut off. Nothing was exported. "
        "Choose another --checkpoint: step_2.\n",
    )
    assert list((run / "exports").iterdir()) == []


def test_a_start_model_that_changed_is_refused(tmp_path):
    base = shutil.copytree(MODEL, tmp_path / "base")
    run = short_run(tmp_path / "run", few_pairs(tmp_path, 20), f"policy.model_name={base}")
    file = base / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    with pytest.raises(CheckpointError) as error:
        export(run)
    assert str(error.value) == (
        f"{run}/checkpoints/step_4: the start model, {base}, changed since this checkpoint was saved, so the trained model "
        "cannot be rebuilt exactly. Restore the start model."
    )


@pytest.mark.parametrize(("form", "use"), [("adapter", "export"), ("merged", "merge")])
def test_adapters_of_a_run_that_has_none_are_refused(made, form, use):
    assert refused(made, form=form) == (
        f"--{form}: {made} trained all weights, so there are no adapters to {use}. Leave out --{form}."
    )


def test_a_folder_of_someone_else_is_never_written_to(made, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    instead = "tandem does not overwrite it. Choose a folder that does not exist yet."
    assert refused(made, out=mine) == f"--out {mine}: not empty, and {instead}"
    assert refused(made, out=made) == f"--out {made}: a run, and {instead}"
    assert contents(mine) == {"thesis.txt": b"years of work"}
    assert (
        refused(made, out=mine / "thesis.txt")
        == f"--out {mine}/thesis.txt: a file, not a folder. Choose another --out."
    )
    (tmp_path / "link").symlink_to(mine)
    link = tmp_path / "link"
    assert refused(made, out=link) == f"--out {link}: a symbolic link. Give the folder itself, or another one."


def test_an_export_of_another_step_form_or_run_is_not_overwritten_and_the_message_says_what_it_is(run, tmp_path):
    out = tmp_path / "out"
    made_of = request_export(run, checkpoint="step_2", out=out).made_of
    out.mkdir()
    record = out / "tandem_export.json"
    record.write_text(json.dumps({"made_of": made_of, "step": 2}))
    instead = f"tandem does not overwrite it. Choose another folder, such as {out}-step_4, or delete this one."
    assert refused(run, checkpoint="step_4", out=out) == (
        f"--out {out}: it holds the export of step 2, and this is the export of step 4, and {instead}"
    )
    instead = instead.replace("step_4", "step_2")
    assert refused(run, checkpoint="step_2", dtype="float16", out=out) == (
        f"--out {out}: it holds an export of this step, 2, in another form (dtype auto, now float16), and {instead}"
    )
    record.write_text(json.dumps({"made_of": made_of | {"checkpoint": "another"}, "step": 2}))
    (tmp_path / "out-step_2").mkdir()
    assert refused(run, checkpoint="step_2", out=out) == (
        f"--out {out}: it holds the export of step 2 of another run, and tandem does not overwrite it. Choose another "
        "folder, or delete this one."
    )


def test_the_help_says_that_a_dry_run_writes_the_export(monkeypatch, capsys):
    _, out, _ = tandem(monkeypatch, capsys, "export", "--help")
    assert "Write the export, and list what would be uploaded; upload nothing." in " ".join(out.split())


def test_options_that_cannot_work_are_refused(made, monkeypatch, capsys):
    assert refused(made, dtype="int4") == (
        "--dtype int4: not a data type of an export. Use one of auto, float32, bfloat16, float16."
    )
    assert refused(made, dtype="bf16") == (
        "--dtype bf16: not a data type of an export. Did you mean bfloat16? Use one of auto, float32, bfloat16, float16."
    )
    assert refused(made, max_shard_size="big") == "--max-shard-size big: not a size. Write 5GB or 500MB, for example."
    assert refused(made, dry_run=True) == (
        "--dry-run lists what --push-to-hub would upload. Add --push-to-hub REPO, or leave out --dry-run."
    )
    assert refused(made, llama_cpp="/llama") == (
        "--llama-cpp /llama has no effect without --gguf. Add --gguf, or leave it out."
    )
    code, _, err = tandem(monkeypatch, capsys, "export", str(made), "--adapter", "--merged")
    assert (code, err) == (2, "tandem: error: --adapter and --merged exclude each other. Leave out one of them.\n")


def test_a_full_disk_leaves_nothing_behind(run, monkeypatch, capsys):
    monkeypatch.setenv("TANDEM_FAIL_AT", "model.sync=disk_full")
    code, _, err = tandem(monkeypatch, capsys, "export", str(run), "--quiet", "--no-measure")
    assert code == 7
    assert err.startswith("tandem: error: the disk is full: ")
    assert err.count("\n") == 1
    assert list((run / "exports").iterdir()) == []
    monkeypatch.delenv("TANDEM_FAIL_AT")
    assert tandem(monkeypatch, capsys, "export", str(run), "--quiet", "--no-measure")[0] == 0


def test_a_checkpoint_without_its_run_needs_a_place_to_go(made, tmp_path):
    place = shutil.copytree(made / "checkpoints/step_2", tmp_path / "step_2")
    assert (
        refused(place) == f"{place}: not in the directory of a run, so the export has no default folder. Add --out DIR."
    )
    done = export(place, out=tmp_path / "out", measured=False)
    assert (done.step, (tmp_path / "out/model.safetensors").is_file()) == (2, True)
