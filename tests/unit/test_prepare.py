"""`tandem prepare`: sets tokenised ahead of training, and their numbers, checked by hand."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from letters import letter_tokenizer
from safetensors.numpy import save_file

from tandem.cli import main as cli
from tandem.cli.app import LOADING_MESSAGE
from tandem.config.load import load_config
from tandem.data.store import making as store_module
from tandem.errors import TandemError
from tandem.training.start.setup import set_up


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with a model of which only the tokenizer and the configuration are read, and a cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    letter_tokenizer().save_pretrained("model")
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    Path("model/config.json").write_text(json.dumps({"model_type": "llama", **small}), encoding="utf-8")
    save_file({"weight": np.zeros(1, np.float32)}, "model/model.safetensors")
    return tmp_path


def pair(prompt: str, chosen: str = "yyy", rejected: str = "no") -> dict[str, str]:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def write(name: str, *rows) -> None:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    Path(name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


# Prompts of 2, 4, ... 20 tokens before completions of 4 and 3: together 6, 8, ... 24. One of 34 is over the limit.
TEN = [pair("p" * length) for length in range(2, 21, 2)]
LIMIT = "policy.max_total_sequence_length=24"


@pytest.fixture
def prepare(here, monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        size = [] if any("batch_size" in argument for argument in arguments) else ["policy.train_global_batch_size=2"]
        monkeypatch.setattr(sys, "argv", ["tandem", "prepare", "policy.model_name=model", *size, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return code or 0, said.out.removeprefix(f"{LOADING_MESSAGE}\n"), said.err

    return run


@pytest.fixture
def report(prepare):
    def run(*arguments: str) -> dict:
        code, out, err = prepare(*arguments, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def test_the_contents_of_a_set_are_shown_as_tables_and_a_histogram(prepare, here):
    write("pairs.jsonl", *TEN, pair("p" * 30))
    code, out, err = prepare("data.train=pairs.jsonl", LIMIT)
    (folder,) = (here / "cache" / "tokens").iterdir()
    assert (code, err) == (0, "")
    # 110 tokens of prompts and 70 of completions; each prompt repeated would be 110 more: 110 / 290 is 38%.
    expected = f"""\
Data
set    rows  accepted  bad  filtered  pairs  prompt tok  compl. tok  longest  sharing can save
train    11        10    0         1     10         110          70       24               38%
  train: read as BinaryPreferenceDataset, detected from the keys prompt, chosen, rejected
  train: skipped 1: over-long
  train: skipped rows are listed in {folder}/rejects.jsonl
  No chat template: texts are used as they are

train: tokens
of                           mean  p50  p90  p95  p99  longest
prompt                       11.0   12   20   20   20       20
completion                    3.5    4    4    4    4        4
prompt + longest completion  15.0   16   24   24   24       24
        0 to       2          0
        2 to       4          0
        4 to       6          0
        6 to       8          1  ####################
        8 to      10          1  ####################
       10 to      12          1  ####################
       12 to      14          1  ####################
       14 to      16          1  ####################
       16 to      18          1  ####################
       18 to      20          1  ####################
       20 to      22          1  ####################
       22 to      24          2  ########################################
  over the limit of 24: 1 left out; by limit: none over 256

Excerpt of the first preference, as the model sees it
  prompt ends        'p p'
  completion starts  'y y y </s>'
  completion ends    'y y y </s>'

train is stored in {folder}
"""
    before, _, rest = out.partition("\nRows of training on this machine: ")
    _, _, after = rest.partition("\nExcerpt")
    shown = f"{before}\nExcerpt{after}"
    assert [line.rstrip() for line in shown.splitlines()] == expected.splitlines()


def test_how_a_set_packs_is_shown(prepare):
    # Nine of 24 tokens and one of 12 are 228 in a row of 256. Padded: 16 sequences of at most 21, and 4 of as many: 420.
    write("pairs.jsonl", *[pair("p" * 17)] * 9, pair("p" * 5))
    _, out, _ = prepare("data.train=pairs.jsonl", "--pack-sizes", "256,512", "policy.train_global_batch_size=10")
    table = out.partition("in them\n")[2].splitlines()[:3]
    assert [line.split()[:8] for line in table[1:]] == [
        ["train", "256", "1", "89.1%", "10.0", "10.0", "1", "1.64"],
        ["train", "512", "1", "89.1%", "10.0", "10.0", "1", "1.64"],
    ]


def test_the_rows_that_training_packs_are_shown(prepare):
    # Ten of 24 tokens in batches of 4, of which two are full: 96 tokens each in rows of 128. Padded: 16 sequences of 21.
    write("pairs.jsonl", *[pair("p" * 17)] * 10)
    _, out, _ = prepare("data.train=pairs.jsonl", "policy.train_global_batch_size=4")
    header, _, table = out.partition("Rows of training on this machine: ")[2].partition("\n")
    assert (
        header == "128 tokens (auto: the longest preference, with all its completions, has 24); an epoch of them, "
        "and a batch of 4 pairs in them"
    )
    assert table.splitlines()[1].split() == ["train", "128", "2", "75.0%", "4.0", "4.0", "1", "1.31"]
    assert "  training steps: 2\n" in out
    assert "Complete sets as packs" not in out


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["policy.packing.share_prompts=false"],
        ["policy.packing.pack_length=256"],
        ["policy.packing.mode=none"],
        ["policy.packing.mode=dataset", "policy.train_global_batch_size=7"],
        ["policy.packing.mode=dataset", "policy.packing.share_prompts=false"],
        ["dpo.val_global_batch_size=3", "policy.train_global_batch_size=4"],
    ],
)
def test_lengths_and_steps_are_those_of_training(report, settings):
    write("pairs.jsonl", *TEN)
    write("held.jsonl", *(pair("q" * length) for length in range(1, 9)))
    size = "policy.train_global_batch_size=5"
    given = ["data.train=pairs.jsonl", "data.validation=held.jsonl", size, *settings]
    found = report(*given)
    setup = set_up(load_config(None, ["policy.model_name=model", *given]).config, torch.device("cpu"))
    shown = {name: one["pack_length"] for name, one in found["training"]["sets"].items()}
    shown |= {name: one["pack_length"] for name, (one,) in found["packs"].items()}
    assert shown == {name: packer.length for name, packer in setup.plan.packers().items()}
    assert (found["num_steps"], found["training"]["length"]) == (setup.plan.num_steps, setup.plan.rows)
    if setup.plan.batches.packs is not None:
        assert found["packs"]["train"][0]["num_packs"] == len(setup.plan.batches.packs)


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (
            ["policy.train_global_batch_size=16"],
            3,
            "the training set has 10 pairs, fewer than one batch of 16, so there would be no step. Set "
            "policy.train_global_batch_size=1 dpo.max_num_epochs=2, which gives 20 steps.",
        ),
        (
            ["policy.packing.mode=dataset", "policy.packing.pack_length=128"],
            2,
            "policy.packing.mode = dataset: a pack of 128 tokens holds 6 pairs, more than a batch of 2. Raise "
            "policy.train_global_batch_size, or lower policy.packing.pack_length.",
        ),
        (
            ["policy.weights=bfloat16_stochastic", "policy.lora.enabled=true"],
            2,
            "policy.weights = bfloat16_stochastic: with adapters the model's weights are frozen, and the adapters are "
            "trained in float32. Leave policy.weights out.",
        ),
        (
            ["checkpointing.metric_name=val_loss"],
            2,
            "checkpointing.metric_name = val_loss: no validation set is given. Set data.validation, or use train:loss.",
        ),
        (
            ["policy.scheduler={name: torch.optim.lr_scheduler.StepLR}"],
            2,
            "policy.scheduler: StepLR: StepLR.__init__() missing 1 required positional argument: 'step_size'",
        ),
    ],
)
def test_configurations_that_training_refuses_are_refused(prepare, settings, code, said):
    write("pairs.jsonl", *TEN)
    with pytest.raises(TandemError) as refused:
        size = [] if "batch_size" in settings[0] else ["policy.train_global_batch_size=2"]
        given = ["policy.model_name=model", "data.train=pairs.jsonl", *size, *settings]
        set_up(load_config(None, given).config, torch.device("cpu"))
    assert str(refused.value) == said
    assert prepare("data.train=pairs.jsonl", *settings) == (code, "", f"tandem: error: {said}\n")


def test_a_problem_of_this_machine_only_is_a_warning(prepare, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    write("pairs.jsonl", *TEN)
    code, out, _ = prepare("data.train=pairs.jsonl", "policy.attention=flex")
    assert code == 0
    assert (
        "warning: training would not start on this machine: policy.attention = flex: FlexAttention has no backward pass on the "
        "CPU. Use policy.attention=auto or sdpa."
    ) in " ".join(out.split())
    assert "  training steps: 5\n" in out


def test_json_holds_the_same_numbers(report, here):
    write("pairs.jsonl", *TEN, pair("p" * 30))
    found = report("data.train=pairs.jsonl", LIMIT)
    (train,) = found["sets"]
    assert train["counts"] == {"rows": 11, "accepted": 10, "bad": {}, "filtered": {"over-long": 1}}
    assert (train["num_pairs"], train["prompt_tokens"], train["completion_tokens"]) == (10, 110, 70)
    assert train["whole_lengths"] == {
        "mean": 15.0,
        "percentiles": {"50": 16, "90": 24, "95": 24, "99": 24},
        "longest": 24,
        "histogram": [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2],
    }
    # Steps of one where nothing is longer than twelve; ten completions of 3 and ten of 4.
    assert train["completion_lengths"]["histogram"] == [0, 0, 0, 10, 10, 0, 0, 0, 0, 0, 0, 0]
    assert (found["max_length"], found["prompt_end"], found["completion_end"]) == (24, "p p", "y y y </s>")
    assert found["folders"] == {"train": str(next((here / "cache" / "tokens").iterdir()))}


def test_percentiles_are_lengths_that_occur_in_the_set(report):
    # 99 prompts of one token and one of 11: half, 90 and 95 of a hundred have one; of the last hundredth one has 11.
    write("pairs.jsonl", *[pair("p", "y" * (i % 5 + 1)) for i in range(99)], pair("p" * 11))
    (train,) = report("data.train=pairs.jsonl")["sets"]
    assert train["prompt_lengths"]["percentiles"] == {"50": 1, "90": 1, "95": 1, "99": 11}
    assert train["prompt_lengths"]["mean"] == pytest.approx(1.1)


def test_shares_over_each_limit_include_rows_left_out(prepare):
    # 4 of 5 preferences fit; two are over 256 tokens, of which one is over 512 and left out.
    rows = [pair("p" * length) for length in (10, 20, 30, 300, 600)]
    write("pairs.jsonl", *rows)
    _, out, _ = prepare("data.train=pairs.jsonl", "policy.max_total_sequence_length=512", "data.max_filtered_share=0.2")
    assert "  over the limit of 512: 1 left out; by limit: 40.0% over 256, 20.0% over 512\n" in out


def test_notes_duplicates_and_rows_left_out_are_reported(prepare, here):
    write("pairs.jsonl", pair("a"), pair("a"), pair("b\x07"), "{", pair("c", "no"))
    settings = ["data.on_bad_row=skip", "data.max_bad_share=1.0", "data.max_filtered_share=1.0"]
    _, out, _ = prepare("data.train=pairs.jsonl", *settings)
    (folder,) = (here / "cache" / "tokens").iterdir()
    assert [line for line in out.splitlines() if "noted" in line or "skipped" in line] == [
        "  train: skipped 1: malformed JSON",
        "  train: skipped 1: equal completions",
        f"  train: skipped rows are listed in {folder}/rejects.jsonl",
        "  train: noted 1: control characters in the text (first at pairs.jsonl:3)",
        "  train: noted 1: preferences that repeat an earlier one (first at pairs.jsonl:2)",
    ]


def test_one_preference_and_one_prompt_are_printed_in_the_singular(prepare):
    write("a.jsonl", pair("x"), pair("y"), pair("z"))
    write("b.jsonl", pair("x"))
    _, out, _ = prepare("data.train=a.jsonl", "data.validation_share=0.3", "policy.train_global_batch_size=1")
    assert "  train: 2 of 3 preferences are trained on, the other 1 is held out; pairs and tokens are of those" in out
    assert " and a batch of 1 pair in them" in " ".join(out.split())
    _, out, err = prepare("data.train=a.jsonl", "data.validation=b.jsonl", "policy.train_global_batch_size=1")
    assert "1 prompt of validation-default is in the training set too." in " ".join((out + err).split())


def test_the_files_of_a_set_are_listed(prepare):
    for name in ("a", "b", "c", "ab"):
        write(f"{name}.jsonl", pair(name))
    _, out, _ = prepare("data.train=?.jsonl")
    assert "  train: 3 files: a.jsonl, b.jsonl, c.jsonl\n" in out
    _, out, _ = prepare("data.train=*.jsonl")
    assert "  train: 4 files: a.jsonl, ab.jsonl, b.jsonl, ...\n" in out


def test_every_set_has_its_part_the_held_out_one_too(prepare, report):
    write("a.jsonl", *TEN)
    write("b.jsonl", *(pair("q" * length) for length in range(1, 11)))
    given = ("data.train=[a.jsonl,b.jsonl]", "data.validation_share=0.25")
    first, second, held = report(*given)["sets"]
    assert [s["name"] for s in (first, second, held)] == ["train-0", "train-1", "validation-default"]
    assert [s["counts"]["accepted"] for s in (first, second, held)] == [10, 10, 5]
    assert (held["format"], held["format_reason"]) == (
        "held out",
        "by data.validation_share; 15 training preferences are left",
    )
    assert (held["prompt_overlap"], first["prompt_overlap"]) == (0, None)
    # of each training set: accepted = held out + trained on
    assert all(s["num_held_out"] + s["num_pairs"] == s["counts"]["accepted"] for s in (first, second, held))
    assert first["num_held_out"] + second["num_held_out"] == held["num_pairs"] == 5
    _, out, _ = prepare(*given)
    heading = next(line for line in out.splitlines() if line.startswith("set "))
    assert heading.split()[:7] == ["set", "rows", "accepted", "bad", "filtered", "held", "out"]
    trained = first["num_pairs"]
    assert (
        f"  train-0: {trained} of 10 preferences are trained on, the other {10 - trained} are held out; pairs and tokens are of "
        "those trained on\n"
    ) in out
    assert [line for line in out.splitlines() if line.endswith(": tokens")] == [
        "train-0: tokens",
        "train-1: tokens",
        "validation-default: tokens",
    ]
    assert [line.split(" is stored in ")[0] for line in out.splitlines() if " is stored in " in line] == [
        "train-0",
        "train-1",
    ]


def test_prepared_data_is_not_tokenised_again(prepare, monkeypatch):
    write("pairs.jsonl", *TEN)
    first = prepare("data.train=pairs.jsonl")
    monkeypatch.setattr(store_module, "write_store", lambda *args, **kwargs: pytest.fail("tokenised again"))
    assert prepare("data.train=pairs.jsonl") == first


def test_quiet_prints_nothing(prepare, here):
    write("pairs.jsonl", *TEN)
    assert prepare("data.train=pairs.jsonl", "--quiet") == (0, "", "")
    assert len(list((here / "cache" / "tokens").iterdir())) == 1


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_bad_file_is_one_message_and_code_3(prepare, here, as_json):
    write("pairs.jsonl", pair("a"), "{")
    assert prepare("data.train=pairs.jsonl", *as_json) == (
        3,
        "",
        "tandem: error: pairs.jsonl: 1 of 2 rows are malformed:\n"
        "  malformed JSON: 1\n"
        "    pairs.jsonl:2: column 2: malformed JSON: Expecting property name enclosed in double quotes.\n"
        "Fix them, or leave them out: data.on_bad_row=skip data.max_bad_share=0.5.\n",
    )


def test_a_missing_file_is_one_message_and_code_3(prepare):
    assert prepare("data.train=no.jsonl") == (
        3,
        "",
        "tandem: error: no.jsonl: no such file or folder, and not the name of a hub dataset (org/name).\n",
    )


@pytest.mark.parametrize(
    ("sizes", "wrong"),
    [
        ("0", "not a list of lengths from 1 to 16777216. Write 4096,8192, for example."),
        ("99999999999999999999", "not a list of lengths from 1 to 16777216. Write 4096,8192, for example."),
        ("-5", "not a list of lengths from 1 to 16777216. Write 4096,8192, for example."),
        (
            "512,3",
            "too short for pairs.jsonl:10, which has 24 tokens. Give longer packs, or lower policy.max_total_sequence_length.",
        ),
    ],
)
def test_pack_sizes_that_hold_nothing_are_refused_by_their_own_name(prepare, sizes, wrong):
    write("pairs.jsonl", *TEN)
    code, out, err = prepare("data.train=pairs.jsonl", f"--pack-sizes={sizes}")
    assert (code, out) == (2, "")
    assert err == f"tandem: error: --pack-sizes {sizes.removeprefix('512,')}: {wrong}\n"


@pytest.mark.parametrize("option", ["--output-dir", "--to-nemo"])
@pytest.mark.parametrize("folder", ["taken", "taken/below"])
def test_a_file_where_a_folder_should_be_is_refused_before_anything_is_read(prepare, option, folder):
    Path("taken").touch()
    code, out, err = prepare("data.train=no.jsonl", option, folder)
    reason = "File exists" if folder == "taken" else "Not a directory"
    assert (code, out, err) == (2, "", f"tandem: error: {option} {folder}: {reason}. Choose another folder.\n")


def test_a_share_held_out_in_training_is_not_packed_into_a_folder(prepare):
    write("pairs.jsonl", *TEN)
    code, _, err = prepare("data.train=pairs.jsonl", "data.validation_share=0.2", "--output-dir", "out")
    assert code == 2
    assert err == (
        "tandem: error: --output-dir out: the packs would contain the complete set, but training holds out "
        "data.validation_share = 0.2 of it. Leave out --output-dir, and training uses the packs in the cache; or split "
        "the file in two.\n"
    )


def test_packs_too_short_for_nemo_are_refused_before_anything_is_written(prepare):
    write("pairs.jsonl", *TEN)
    given = ["data.train=pairs.jsonl", "--pack-sizes", "128", "--output-dir", "out", "--to-nemo", "nemo"]
    write("pairs.jsonl", pair("p" * 100, "yyy", "no"), pair("p" * 100, "yyyy", "no"))
    code, out, err = prepare(*given)
    assert (code, out) == (2, "")
    assert err == (
        "tandem: error: --to-nemo: a pack of 128 tokens cannot hold the pair at pairs.jsonl:1, which takes 205 tokens "
        "with its prompt repeated for both completions. Raise --pack-sizes, or leave out --to-nemo.\n"
    )
    assert not any(Path("out").iterdir())


def test_a_length_given_twice_is_packed_once(report):
    write("pairs.jsonl", *TEN)
    found = report("data.train=pairs.jsonl", LIMIT, "--pack-sizes", "256,128,256")
    assert [packs["pack_length"] for packs in found["packs"]["train"]] == [128, 256]


def test_lengths_that_are_rounded_up_to_the_same_length_are_packed_once(prepare):
    write("pairs.jsonl", *TEN)
    assert prepare("data.train=pairs.jsonl", LIMIT, "--pack-sizes", "64,100,128", "--output-dir", "out")[0] == 0
    manifest = json.loads(Path("out/train/manifest.json").read_text(encoding="utf-8"))
    assert [packs["pack_length"] for packs in manifest["packs"]] == [128]


def test_an_interrupted_preparation_reports_its_partial_files(prepare, here, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    write("pairs.jsonl", *TEN)
    monkeypatch.setattr(store_module, "write_store", interrupted)
    assert prepare("data.train=pairs.jsonl") == (
        130,
        "",
        "tandem: interrupted. No incomplete files were kept; run the same command to start again.\n",
    )
    assert list((here / "cache" / "tokens").iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "given"),
    [("--seed", "3", "run.seed=4"), ("--packing-algorithm", "bfd", "policy.packing.algorithm=first_fit_decreasing")],
)
def test_an_option_and_its_key_are_refused_together(prepare, option, value, given):
    code, _, err = prepare(option, value, given)
    assert (code, err) == (2, f"tandem: error: {option} {value} and {given} set the same key. Leave out one of them.\n")


# Packs of NeMo Aligner


@pytest.fixture
def packs(prepare, here) -> str:
    """Five pairs in the embedded model's tokens, as a packed file."""
    write("pairs.jsonl", *(pair("p" * length) for length in range(1, 6)))
    prepare("policy.model_name=embedded", "data.train=pairs.jsonl", "--to-nemo", "nemo")
    (file,) = (here / "nemo" / "train").iterdir()
    return str(file.relative_to(here))


def command_in(said: str) -> list[str]:
    lines = said.splitlines()
    words = shlex.split(lines[lines.index("Train on it:") + 1])
    return ["tandem", *words[words.index("train") :]]


def test_the_command_for_imported_packs_names_model_limit_and_the_settings_given(prepare, packs):
    given = [LIMIT.replace("24", "300"), "dpo.max_num_steps=2", "--seed", "7"]
    code, out, _ = prepare("policy.model_name=embedded", "--from-nemo", packs, "--output-dir", "my packs", *given)
    assert code == 0
    assert command_in(out) == [
        "tandem",
        "train",
        "data.train.data_path='my packs/train'",
        "policy.model_name=model",
        "policy.train_global_batch_size=2",
        "policy.model_name=embedded",
        "policy.max_total_sequence_length=300",
        "dpo.max_num_steps=2",
        "run.seed=7",
    ]


def test_the_command_for_imported_packs_runs_as_printed(prepare, packs, monkeypatch):
    given = ["policy.model_name=embedded", "dpo.max_num_steps=1", "dpo.val_period=0", "checkpointing.enabled=false"]
    _, out, _ = prepare("--from-nemo", packs, "--output-dir", "my packs", *given)
    monkeypatch.setattr(sys, "argv", command_in(out))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (None, 0)
    assert list(Path("runs").glob("*/metrics.jsonl"))


def test_packs_of_another_vocabulary_are_refused(prepare, packs, here):
    config = {"model_type": "llama", "vocab_size": 36}
    Path("model/config.json").write_text(json.dumps(config), encoding="utf-8")
    code, _, err = prepare("--from-nemo", packs, "--output-dir", "out")
    assert code == 3
    assert re.fullmatch(
        rf"tandem: error: {packs}: token id \d+, but the model \(model\) has only 36 tokens\. Set policy\.model_name "
        r"to the model that the packs were made for\.\n",
        err,
    )
    assert list(Path("out").iterdir()) == []


@pytest.mark.parametrize("how", ["drop", "error"])
def test_duplicates_in_imported_packs_are_treated_as_asked(prepare, how):
    write("pairs.jsonl", pair("a"), pair("b"), pair("a"))
    prepare("data.train=pairs.jsonl", "--to-nemo", "nemo")
    (file,) = Path("nemo/train").iterdir()
    code, out, err = prepare("--from-nemo", str(file), "--output-dir", "out", f"data.duplicates={how}")
    if how == "drop":
        assert (code, err) == (0, "")
        assert "  train: skipped 1: duplicate\n" in out
        assert json.loads(Path("out/train/manifest.json").read_text())["counts"]["accepted"] == 2
    else:
        assert code == 3
        assert "which data.duplicates=error does not allow" in err


def test_dropped_duplicates_are_reported_and_not_written(prepare):
    write("pairs.jsonl", pair("a"), pair("b"), pair("a"))
    code, out, err = prepare("data.train=pairs.jsonl", "data.duplicates=drop", "--output-dir", "out")
    assert (code, err) == (0, "")
    assert "train     3         2    0         1      2 " in out
    assert "  train: skipped 1: duplicate\n  train: skipped rows are listed in out/train/rejects.jsonl\n" in out
    (reject,) = map(json.loads, Path("out/train/rejects.jsonl").read_text().splitlines())
    assert (reject["place"], reject["message"]) == (
        "pairs.jsonl:3",
        "the same prompt and completions as pairs.jsonl:1.",
    )
    assert prepare("data.train=out/train", "data.duplicates=drop")[0] == 0
    _, _, err = prepare("data.train=out/train")
    assert err == (
        "tandem: error: out/train: prepared with data.duplicates = drop, now keep. Set data.duplicates=drop, or prepare it "
        "again.\n"
    )


# The command line of NeMo Aligner's packing script, as in its guide
SCRIPT = [
    *("--from-format", "nemo-aligner", "model.data.data_prefix=theirs.jsonl", "+model.encoder_seq_length=24"),
    *("+tokenizer_path=model", "+tokenizer_type=huggingface", "+output_dir=packed", "+pack_sizes=[256,128]"),
    *("+packing_algorithm=first_fit_shuffle", "++model.seed=0"),
]


def test_the_arguments_of_nemo_aligners_packing_script_are_translated(prepare):
    rows = [{"prompt": "p" * n, "chosen_response": "yyy", "rejected_response": "no"} for n in range(2, 21, 2)]
    write("theirs.jsonl", *rows)
    code, shown, reported = prepare(*SCRIPT)
    assert (code, reported) == (0, "")
    assert "\n  pack_sizes = [256, 128] -> --pack-sizes 256,128  (an option of tandem prepare)\n" in shown
    assert "\n  packing_algorithm = first_fit_shuffle -> policy.packing.algorithm =" in shown
    ours = [
        *("data.train=theirs.jsonl", "policy.max_total_sequence_length=24", "policy.tokenizer.chat_template=null"),
        *("--output-dir", "ours", "--pack-sizes", "128,256", "--packing-algorithm", "first_fit_shuffle", "--seed", "0"),
        *("data.default_chosen_reward=1", "data.default_rejected_reward=0"),
    ]
    assert prepare(*ours)[0] == 0
    names = ("tokens.arrow", "packs-128.arrow", "packs-256.arrow")
    for name in names:
        assert Path("packed/train", name).read_bytes() == Path("ours/train", name).read_bytes()
    assert {path.name for path in Path("packed/train").glob("*.arrow")} == set(names)


def test_an_option_that_an_argument_of_the_script_also_gives_is_refused(prepare):
    write("theirs.jsonl", {"prompt": "p", "chosen_response": "yyy", "rejected_response": "no"})
    code, _, reported = prepare(*SCRIPT, "--output-dir", "mine")
    assert code == 2
    assert reported == (
        "tandem: error: --output-dir mine: a key of NeMo Aligner sets it to packed. Leave out one of them.\n"
    )
