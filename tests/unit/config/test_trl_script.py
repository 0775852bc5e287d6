"""Settings of TRL's training scripts, read from their syntax tree: nothing in a script is run."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tandem.config.load import load_config
from tandem.errors import ConfigError

SCRIPT = """
import torch
from datasets import load_dataset
from peft import LoraConfig, TaskType
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

raise SystemExit("a script must not be run")
NAME = "org/model"
RATE: float = 5e-6

def main():
    model = AutoModelForCausalLM.from_pretrained(NAME, dtype=torch.bfloat16, device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained(NAME)
    dataset = load_dataset("org/pairs", "small")
    args = DPOConfig(
        "results/mine",
        beta=0.2,
        learning_rate=RATE,
        loss_type=["sigmoid", "sft"],
        eval_strategy="steps",
        eval_steps=10,
        max_grad_norm=1,
    )
    args.max_length = 512
    peft = LoraConfig(r=32, target_modules=["q_proj", "v_proj"], task_type=TaskType.CAUSAL_LM, bias="none")
    trainer = DPOTrainer(
        model,
        None,
        args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        processing_class=tokenizer,
        peft_config=peft,
    )
    trainer.train()
"""


@pytest.fixture
def load(tmp_path):
    def loaded(text: str, *overrides: str):
        path = tmp_path / "theirs.py"
        path.write_text(text)
        return load_config(path, list(overrides))

    return loaded


def test_the_calls_of_a_script_are_translated(load, tmp_path):
    loaded = load(SCRIPT)
    config = loaded.config
    assert (config.policy.model_name, config.run.dir) == ("org/model", "results/mine")
    assert (config.dpo.reference_policy_kl_penalty, config.policy.optimizer.kwargs.lr) == (0.2, 5e-6)
    assert (config.dpo.sft_loss_weight, config.policy.max_total_sequence_length) == (1.0, 512)
    lora = config.policy.lora
    assert (lora.enabled, lora.dim, lora.alpha, lora.dropout) == (True, 32, 8, 0.0)  # peft's defaults
    (train,), validation = config.data.training_sets, config.data.validation
    assert (train.data_path, train.subset, train.split) == ("org/pairs", "small", "train")
    assert (validation.data_path, validation.subset, validation.split) == ("org/pairs", "small", "test")
    assert loaded.origins["dpo.reference_policy_kl_penalty"] == f"{tmp_path / 'theirs.py'}:18"
    found = {row.key: row.kind for row in loaded.translation.rows}
    assert found["processing_class"] == found["model_init_kwargs.device_map"] == "no effect"


def test_the_shortest_script_of_the_guide(load):
    loaded = load(
        "trainer = DPOTrainer(model='org/model', train_dataset=load_dataset('org/pairs', split='train'))\ntrainer.train()\n"
    )
    assert (loaded.config.policy.model_name, loaded.config.dpo.max_num_epochs) == ("org/model", 3)


def test_earlier_scripts_give_the_trainer_the_settings_of_the_loss(load):
    loaded = load(
        "model = AutoModelForCausalLM.from_pretrained('org/model', load_in_4bit=False)\n"
        "ref = transformers.AutoModelForCausalLM.from_pretrained('org/other')\n"
        "t = DPOTrainer(model, ref, args=TrainingArguments(output_dir='out'), beta=0.3, max_length=256, tokenizer='org/words',\n"
        "    train_dataset=datasets.load_dataset('json', data_files='pairs.jsonl', split='train'), max_prompt_length=None)\n",
        "~model_init_kwargs.load_in_4bit",
    )
    config = loaded.config
    assert (config.reference.model, config.policy.tokenizer.name) == ("org/other", "org/words")
    assert (config.dpo.reference_policy_kl_penalty, config.policy.max_total_sequence_length) == (0.3, 256)
    assert config.data.training_sets[0].data_path == "pairs.jsonl"


def test_quantised_models(load):
    loaded = load(
        "q = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_compute_dtype=torch.bfloat16)\n"
        "model = AutoModelForCausalLM.from_pretrained('org/model', quantization_config=q)\n"
        "DPOTrainer(get_peft_model(model, LoraConfig(use_rslora=True)), args=DPOConfig(), train_dataset=load_dataset('a/b'))\n"
    )
    lora = loaded.config.policy.lora
    assert (lora.quantization, lora.dim, lora.alpha, lora.use_rslora) == ("nf4", 8, 8, True)


@pytest.mark.parametrize("given", ["[5, 7]", "{'embed_tokens': [5, 7]}"])
def test_tokens_whose_embeddings_are_trained(load, given):
    loaded = load(
        f"DPOTrainer('org/model', peft_config=LoraConfig(trainable_token_indices={given}), train_dataset=load_dataset('a/b'))\n"
    )
    assert loaded.config.policy.lora.trainable_token_indices == [5, 7]


def test_the_script_of_the_readme(load):
    text = Path(__file__).parents[3].joinpath("README.md").read_text().split("## Coming from TRL")[1]
    script, ours = text.split("```python\n")[1].split("```")[0], text.split("```yaml\n")[1].split("```")[0]
    loaded = load(script)
    data = loaded.config.data
    assert (data.training_sets[0].data_path, data.validation_share, data.validation) == ("pairs.jsonl", 0.05, None)
    rows = {row.key: row.outcome for row in loaded.translation.rows}
    assert rows["train_dataset.train_test_split.test_size"].note.startswith("other pairs than TRL holds out")
    assert rows["train_dataset.train_test_split.seed"].kind == rows["eval_dataset.part"].kind == "no effect"
    # The two columns of the README are the same run.
    theirs = loaded.config.model_dump()
    mine = load_own(ours)
    for path in (
        "policy.train_global_batch_size",
        "policy.max_total_sequence_length",
        "policy.optimizer",
        "policy.scheduler",
    ):
        assert at(theirs, path) == at(mine, path), path
    for path in ("dpo.max_num_epochs", "dpo.reference_policy_kl_penalty", "dpo.val_period", "data.validation_share"):
        assert at(theirs, path) == at(mine, path), path


def load_own(text: str) -> dict:
    with TemporaryDirectory() as folder:
        path = Path(folder, "run.yaml")
        path.write_text(text)
        return load_config(path, []).config.model_dump()


def at(tree: dict, path: str):
    for part in path.split("."):
        tree = tree[part]
    return tree


@pytest.mark.parametrize(
    "text",
    [
        "d = load_dataset('a/b', split='train')\nparts = d.train_test_split(0.1, seed=3)\nDPOTrainer('m',"
        " train_dataset=parts['train'], eval_dataset=parts['test'], args=DPOConfig(eval_strategy='epoch'))",
        "def main():\n  d = load_dataset('a/b')\n  d = d['train'].shuffle(seed=1)\n  d = d.train_test_split(test_size=SHARE)\n"
        "  train, unused = d['train'], 0\n  DPOTrainer('m', train_dataset=d['train'], eval_dataset=d['test'])\nSHARE = 0.1",
        "DPOTrainer('m', train_dataset=load_dataset('a/b')['train'].train_test_split(0.1)['train'].shuffle(seed=1))",
    ],
    ids=["other name", "reassigned in a function", "chained"],
)
def test_pairs_that_a_script_holds_out(load, text):
    data = load(text).config.data
    assert (data.training_sets[0].data_path, data.training_sets[0].split) == ("a/b", "train")
    assert (data.validation_share, data.validation) == (0.1, None)


def test_the_first_rows_of_a_script(load):
    rows = "load_dataset('a/b', split='train[:50]').select(range(20))"
    text = f"d = {rows}.train_test_split()\nDPOTrainer('m', train_dataset=d['train'])"
    data = load(text).config.data
    assert (data.training_sets[0].max_rows, data.validation_share) == (
        20,
        0.25,
    )  # 0.25: the default of train_test_split


def test_a_share_replaces_a_number_of_pairs(load):
    text = "d = load_dataset('a/b', split='train').train_test_split(500)\nDPOTrainer('m', train_dataset=d['train'])"
    loaded = load(text, "~train_dataset.train_test_split.test_size", "data.validation_share=0.05")
    assert loaded.config.data.validation_share == 0.05


def test_the_file_of_another_split_has_no_effect(load):
    files = "data_files={'train': 'pairs.jsonl', 'test': 'held.jsonl'}"
    alone = f"DPOTrainer('m', train_dataset=load_dataset('json', {files}, split='train'))"
    rows = {row.key: row.outcome for row in load(alone).translation.rows}
    assert rows["train_dataset.data_files.train"].settings == {"data.train.data_path": "pairs.jsonl"}
    assert rows["train_dataset.data_files.test"].kind == "no effect"
    assert rows["train_dataset.data_files.test"].note == "split=train reads the other file."
    both = (
        f"d = load_dataset('json', {files})\nargs = DPOConfig(eval_strategy='epoch')\n"
        "DPOTrainer('m', args=args, train_dataset=d['train'], eval_dataset=d['test'])"
    )
    loaded = load(both)
    rows = {row.key: row.outcome for row in loaded.translation.rows}
    assert (
        rows["train_dataset.data_files.test"].note == "split=train reads the other file; eval_dataset reads this one."
    )
    assert rows["eval_dataset.data_files.test"].settings == {"data.validation.data_path": "held.jsonl"}
    assert loaded.config.data.training_sets[0].data_path == "pairs.jsonl"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a = DPOConfig(\n  learning_rate=float(sys.argv[1]),\n  fp16=not is_bf16())\nDPOTrainer(model=pick(), args=a)\n",
            "FILE: 3 settings cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:4: model = pick(): not a literal value.\n"
            "  FILE:2: learning_rate = float(sys.argv[1]): not a literal value.\n"
            "  FILE:3: fp16 = not is_bf16(): not a literal value.",
        ),
        (
            "x = 1\nx = 2\nfor y in z: pass\nDPOConfig(beta=x, seed=y, **more)\n",
            "FILE: 3 settings cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:4: **more of DPOConfig(...) hides its names.\n"
            "  FILE:4: beta = x: x is assigned several times.\n"
            "  FILE:4: seed = y: y is not assigned a literal value.",
        ),
        (
            "d = load_dataset('a/b')\nDPOTrainer('m', train_dataset=d.map(f), callbacks=[Stop()], peft_config=get_peft())\n",
            "FILE: 3 settings cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:2: train_dataset: .map(...) is not run. Write the rows to a file, and load that file.\n"
            "  FILE:2: callbacks is code, which tandem does not run. Remove it.\n"
            "  FILE:2: peft_config is not LoraConfig(...) with literal values.",
        ),
        (
            "d = load_dataset('a/b', split='train')\nif x:\n  d = d.select(range(9))\nDPOTrainer('m', train_dataset=d)\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:4: train_dataset: d is assigned several times, in branches, loops or functions. Assign it once.",
        ),
        (
            "d = load_dataset('a/b')\nd['train'] = d['train'].map(f)\nDPOTrainer('m', train_dataset=d['train'])\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:3: train_dataset: d[...] is assigned, and the assignment is not run.",
        ),
        (
            "d = load_dataset('a/b', split='train').shuffle(seed=1).select(range(9))\nDPOTrainer('m', train_dataset=d)\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:1: train_dataset: .select(...) after .shuffle(...) takes other rows than the first. Remove it; "
            "data.validation_share holds out pairs, and data.train.max_rows reads the first rows.",
        ),
        (
            "d = load_dataset('a/b', split='train').select(range(2, 9))\nDPOTrainer('m', train_dataset=d)\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:1: train_dataset: .select(...) takes other rows than range(N). Remove it; "
            "data.validation_share holds out pairs, and data.train.max_rows reads the first rows.",
        ),
        (
            "d = load_dataset('a/b', split='train').train_test_split(0.1)\nDPOTrainer('m', train_dataset=d)\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            '  FILE:1: train_dataset: it is both parts of train_test_split(...). Take ["train"].',
        ),
        (
            "d = load_dataset('a/b', split='train').train_test_split(0.1)\n"
            "DPOTrainer('m', train_dataset=d['test'], eval_dataset=d['train'])\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            '  FILE:1: train_dataset is the part that is held out. Take the part ["train"].',
        ),
        (
            "d = load_dataset('a/b', split='train')\n"
            "DPOTrainer('m', train_dataset=d, eval_dataset=d.train_test_split(0.1)['test'])\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            '  FILE:1: eval_dataset is the part ["test"] of train_test_split(...), and train_dataset is not its part ["train"].',
        ),
        (
            "d = load_dataset('a/b', split='train').train_test_split(0.1)\n"
            "DPOTrainer('m', train_dataset=d['train'], eval_dataset=load_dataset('c/d'))\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:2: eval_dataset is another dataset than train_dataset.train_test_split(...) holds out. tandem validates on "
            "one of the two. Remove the other.",
        ),
        (
            "d = load_dataset('a/b', split='train').train_test_split(test_size=500)\nDPOTrainer('m', train_dataset=d['train'])\n",
            "TRL configuration: a key cannot be translated.\n"
            "  FILE:1: train_dataset.train_test_split.test_size = 500: tandem holds out a share of the pairs, which are not "
            "counted yet. Set a number between 0 and 1, or replace it: ~train_dataset.train_test_split.test_size "
            "data.validation_share=0.05.",
        ),
        (
            "DPOConfig(output_dir='${oc.env:HOME}')\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:1: output_dir = '${oc.env:HOME}': it contains ${, which tandem would replace.",
        ),
        (
            "m = AutoPeftModelForCausalLM.from_pretrained('a/b')\nDPOTrainer(m)\n",
            "FILE: a setting cannot be read, because the script is not run. Write literal values in a copy.\n"
            "  FILE:1: model is a trained adapter. Set policy.lora.adapter to its folder.",
        ),
        (
            "parser = TrlParser((DPOConfig,))\n",
            "FILE: no DPOTrainer(...) and no DPOConfig(...) is called in it. If the script parses flags, give them to tandem: "
            "tandem train --from-format trl -- --FLAG VALUE.",
        ),
        (
            "DPOTrainer('a')\nDPOTrainer('b')\n",
            "FILE: DPOTrainer(...) is called several times, on lines 1 and 2, so the script has several runs. Keep one in a copy "
            "of the script.",
        ),
        ("def f(:\n", "FILE:1: not readable as Python: invalid syntax."),
        (
            "x = [1]\nDPOConfig(beta=0.1, bta=0.2)\n",
            "TRL configuration: 2 keys cannot be translated.\n"
            "  FILE:2: bta = 0.2: tandem does not know this key of TRL. Did you mean beta? Otherwise remove it.\n"
            "  FILE:2: model_name_or_path = null: Name the model to train.",
        ),
    ],
)
def test_what_is_not_literal_is_refused_by_name_and_line(load, tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        load(text)
    assert str(error.value) == message.replace("FILE", str(tmp_path / "theirs.py"))


HOSTILE = {
    "deep brackets": "DPOConfig(beta=" + "[" * 5000 + "]" * 5000 + ")",
    "nested lists": "DPOConfig(beta=" + "[" * 90 + "1" + "]" * 90 + ")",
    "deep minus": "DPOConfig(beta=" + "-" * 5000 + "1)",
    "long sum": "DPOConfig(beta=" + "1+" * 50_000 + "1)",
    "long attribute": "DPOConfig(beta=a" + ".b" * 50_000 + ")",
    "long call": "DPOTrainer(a" + "()" * 20_000 + ")",
    "long number": "DPOConfig(beta=" + "9" * 10_000 + ")",
    "doubling": "a = [1, 1]\n"
    + "".join(f"a{i} = [a{i - 1 or ''}, a{i - 1 or ''}]\n" for i in range(1, 60))
    + "DPOConfig(beta=a59)",
    "circle": "a = b\nb = a\nDPOConfig(beta=a)\nDPOTrainer(a, args=b)",
    "own list": "a = [a]\nDPOConfig(beta=a)",
    "zero byte": "DPOConfig(beta=1)\0",
    "large": "# " + "x" * (1024 * 1024),
    "escape": "DPOConfig('\x1b[2J\\d', beta=0.1)",
    "surrogate": "DPOConfig('\\ud800', beta=0.1)",
    "many keys": "DPOConfig(" + ",".join(f"k{i}=1" for i in range(2_000)) + ")",
    "many problems": "DPOConfig(" + ",".join(f"k{i}=f()" for i in range(5_000)) + ")",
    "keyword as attribute": "DPOConfig(__class__=1)",
    "empty": "",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_script_ends_in_one_message(load, text):
    with pytest.raises(ConfigError) as error:
        load(text)
    assert str(error.value)


def test_a_script_that_is_no_text_or_not_there(tmp_path):
    (tmp_path / "bytes.py").write_bytes(b"import trl\n# \xfc\n")
    with pytest.raises(ConfigError, match=r"bytes\.py: not UTF-8 at byte 2 of line 2\. Save the file as UTF-8\.$"):
        load_config(tmp_path / "bytes.py")
    with pytest.raises(ConfigError, match=r"none\.py: no such script\.$"):
        load_config(tmp_path / "none.py")


@pytest.mark.slow
def test_one_step_from_a_script(tmp_path):
    from tandem.cli.main import app

    path = tmp_path / "theirs.py"
    path.write_text(
        f"args = DPOConfig(output_dir={str(tmp_path / 'run')!r}, per_device_train_batch_size=4, max_steps=1, bf16=False)\n"
        "DPOTrainer(model='embedded', args=args, train_dataset=load_dataset('embedded'))\n"
    )
    app(["train", "--quiet", "--config", str(path)], standalone_mode=False)
    (line,) = [json.loads(line) for line in Path(tmp_path, "run/metrics.jsonl").read_text().splitlines()]
    assert (line["split"], line["step"]) == ("train", 1)
