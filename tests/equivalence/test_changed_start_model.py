"""A start model or a reference that changed since the run trained with it is refused wherever the run needs it again."""

import shutil

import pytest
from models import MODEL
from running import few_pairs, killed_after, short_run

from tandem.errors import CheckpointError
from tandem.evaluation.evaluate import evaluate
from tandem.generation.generate import generate
from tandem.generation.records import Sampling

pytestmark = pytest.mark.usefixtures("of_a_command")

ADAPTERS = ("policy.lora.enabled=true", "policy.lora.dim=4", "export.merge_lora=false")


def change(base):
    file = base / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def run_from(base, tmp_path, *settings):
    return short_run(tmp_path / "run", few_pairs(tmp_path, 20), f"policy.model_name={base}", *settings)


@pytest.fixture
def base(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "base")


@pytest.fixture
def pairs(tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text('{"prompt": "Hi", "chosen": "yes", "rejected": "no"}\n' * 2)
    return [str(file)]


def refused(call, *given, **options):
    with pytest.raises(CheckpointError) as error:
        call(*given, **options)
    return str(error.value)


def test_a_run_is_not_measured_against_a_changed_start_model(base, tmp_path, pairs):
    run = run_from(base, tmp_path)
    assert evaluate(str(run), pairs).reference == str(base)
    change(base)
    message = (
        f"its start model, {base}, changed since the run trained with it, so rewards would not be those that it was "
        f"trained with. Restore that model, or compare with it as it is now: --reference {base}."
    )
    assert refused(evaluate, str(run), pairs) == f"{run}: {message}"
    checkpoint = f"{run}/checkpoints/step_4"
    assert "the start model" in refused(evaluate, checkpoint, pairs)
    assert refused(evaluate, "embedded", pairs, against=str(run), reference=None) == f"{run}: {message}"
    assert evaluate(str(run), pairs, reference=str(base)).reference == str(base)


def test_a_run_is_not_measured_against_a_changed_reference_model(base, tmp_path, pairs):
    run = short_run(tmp_path / "run", few_pairs(tmp_path, 20), f"reference.model={base}")
    assert evaluate(str(run), pairs).reference == str(base)
    change(base)
    assert refused(evaluate, str(run), pairs).startswith(f"{run}: its reference model, {base}, changed since")


def test_adapters_are_not_loaded_on_a_changed_base_model(base, tmp_path, pairs):
    run = run_from(base, tmp_path, *ADAPTERS)
    given = {"prompts": ["Hi"], "sampling": Sampling(max_new_tokens=2)}
    assert generate(str(run), **given).num_prompts == 1
    change(base)
    message = (
        f"{run}: its start model, {base}, changed since the run trained with it, so its adapters do not belong to it. "
        "Restore that model."
    )
    assert refused(evaluate, str(run), pairs, reference=str(base)) == message
    assert refused(evaluate, str(MODEL), pairs, reference=str(run)) == message
    assert refused(generate, str(run), **given) == message


def test_a_run_does_not_resume_on_a_changed_start_model(base, tmp_path):
    settings = [few_pairs(tmp_path, 20), f"policy.model_name={base}", "checkpointing.save_period=1"]
    with killed_after(2):
        short_run(tmp_path / "run", *settings)
    change(base)
    assert refused(short_run, tmp_path / "run", *settings) == (
        f"policy.model_name = {base}: this model changed since {tmp_path}/run began, so the run cannot resume. Restore it, or "
        "start again with --fresh."
    )
