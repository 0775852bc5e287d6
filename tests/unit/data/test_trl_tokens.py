"""Tokens of translated TRL configurations: those of TRL's DPOTrainer, for rows of messages and for rows of plain text."""

import json
import random

import pytest
from letters import CHAT, END, EOS, letter_tokenizer
from rows import said

from tandem.config.load import load_config
from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.store.opening import open_store
from tandem.data.text.template import make_template

# A turn ends in <end>; TRL also scores the newline that the template writes after it.
AFTER_THE_TURN = 1


def trl_ids(tokenizer, row):
    """Prompt, chosen and rejected as DPOTrainer._prepare_dataset tokenises them.

    Messages are rendered by the chat template; a text is followed by EOS, and encoded together with its prompt.
    """
    if isinstance(row["prompt"], list):
        render = tokenizer.apply_chat_template
        prompt = render(row["prompt"], add_generation_prompt=True, return_dict=False)
        ids = [render(row["prompt"] + row[side], return_dict=False)[len(prompt) :] for side in ("chosen", "rejected")]
        assert all(one[-1 - AFTER_THE_TURN] == END for one in ids)
        return [prompt, *(one[:-AFTER_THE_TURN] for one in ids)]
    prompt = tokenizer(row["prompt"])["input_ids"]
    texts = [text if text.endswith("</s>") else text + "</s>" for text in (row["chosen"], row["rejected"])]
    return [prompt, *(tokenizer(row["prompt"] + text)["input_ids"][len(prompt) :] for text in texts)]


def random_row(rng, *, as_messages):
    # No prompt ends in a, so that no token of TRL's spans the boundary: ab is one token.
    asked = "q" + "".join(rng.choices("ab :?", k=rng.randint(1, 8))) + rng.choice(" ?")
    better, worse = ("".join(rng.choices("abc!", k=6)) + end for end in ("", rng.choice(["", "</s>", "<end>"])))
    if not as_messages:
        return {"prompt": asked, "chosen": "d" + better, "rejected": worse}
    turns = [said("user", asked)]
    if rng.random() < 0.5:
        turns += [said("assistant", worse.replace("<end>", "").replace("</s>", "")), said("user", asked)]
    answers = ("d" + better, worse.replace("<end>", "").replace("</s>", ""))
    return {"prompt": turns} | {
        side: [said("assistant", answer)] for side, answer in zip(("chosen", "rejected"), answers, strict=True)
    }


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("kinds", [[True], [False], [True, False]], ids=["messages", "text", "both"])
def test_a_translated_configuration_has_the_tokens_of_trl(adds_bos, kinds, tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    theirs = tmp_path / "dpo.yaml"
    theirs.write_text("model_name_or_path: org/model\ndataset_name: org/pairs\nbeta: 0.1\nloss_type: sigmoid\n")
    settings = load_config(str(theirs), []).config.policy.tokenizer
    tokenizer = letter_tokenizer(adds_bos=adds_bos, chat_template=CHAT)
    rng = random.Random(7)
    rows = [random_row(rng, as_messages=rng.choice(kinds)) for _ in range(60)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    store = open_store(str(source), DatasetFields(), make_template(tokenizer, settings), Data(), 1000)
    found = [[one.prompt.tolist(), *(ids.tolist() for ids in one.completions)] for one in store]
    assert found == [trl_ids(tokenizer, row) for row in rows]
    ends = {ids[-1] for _, *completions in found for ids in completions}
    assert ends == {END if is_messages else EOS for is_messages in kinds}
