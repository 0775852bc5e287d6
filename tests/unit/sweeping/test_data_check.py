"""A sweep is refused before its first run starts if training would refuse one of the runs after reading its data."""

import json

import pytest

import tandem
from tandem.errors import DataError, TandemError
from tandem.sweeping import children
from tandem.sweeping.sweep import sweep

pytestmark = pytest.mark.usefixtures("of_a_command")

TOO_FEW = (
    "the training set has 6 pairs, fewer than one batch of {}, so there would be no step. Set "
    "policy.train_global_batch_size=1 dpo.max_num_epochs=4, which gives 24 steps."
)


@pytest.fixture(autouse=True)
def six_pairs(tmp_path, monkeypatch):
    """Six pairs of over 128 tokens, and no run that could start."""
    rows = [
        {"prompt": f"Question {n}?", "chosen": f"Yes, {n}. {'word ' * 200}", "rejected": f"No, not {n}."}
        for n in range(6)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(children, "COMMAND", ("/bin/false",))
    monkeypatch.chdir(tmp_path)


def refusal(*overrides: str, dry_run: bool = False) -> str:
    given = ["data.train=pairs.jsonl", "policy.model_name=embedded", *overrides]
    with pytest.raises(TandemError) as refused:
        sweep(given, out="s", dry_run=dry_run)
    return str(refused.value)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_run_with_fewer_pairs_than_one_batch_is_named(tmp_path, dry_run):
    sizes = "policy.train_global_batch_size=2,7,8"
    expected = f"run 2 of 3, policy.train_global_batch_size=7: {TOO_FEW.format(7)}"
    assert refusal(sizes, dry_run=dry_run) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_an_error_of_every_run_is_reported_without_a_run():
    assert refusal("run.seed=1,2", "policy.train_global_batch_size=7") == TOO_FEW.format(7)
    assert refusal("policy.train_global_batch_size=7,8").startswith("run 1 of 2, policy.train_global_batch_size=7: ")


def test_rows_and_sequences_are_checked_too(tmp_path):
    batch = "policy.train_global_batch_size=2"
    found = refusal(batch, "policy.packing.pack_length=2048,128")
    assert found.startswith(
        "run 2 of 2, policy.packing.pack_length=128: policy.packing.pack_length = 128, but a sequence at "
    )
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "chosen": "b"}\n')
    with pytest.raises(DataError, match=r"run 2 of 2, data.train=other.jsonl: .*other.jsonl"):
        tandem.sweep([batch, "data.train=pairs.jsonl,other.jsonl", "policy.model_name=embedded"], out="s")


def test_a_run_on_several_devices_is_checked_without_a_device():
    given = ["cluster.gpus_per_node=2", "run.seed=1,2", "policy.train_global_batch_size=7"]
    assert refusal(*given) == TOO_FEW.format(7)
