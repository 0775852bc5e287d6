"""Files in the formats of published preference sets: the format, the pairs and the counts are as computed from the rows here.

Each builder makes a row as the documentation named in its docstring describes it, and says which pairs the row holds.
"""

import json
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from letters import CHAT, ids, letter_tokenizer
from rows import said, turn

from tandem.config.sections.datasets import Data, DatasetFields
from tandem.data.store.opening import open_store
from tandem.data.text.template import Template

NUM_ROWS = 40
TIE, DIFFER, NO_RANKS = "equal ranks", "prompts differ", "no ranked replies"
LENIENT = Data(max_filtered_share=1.0)
# Writes the calls of a message as JSON after its content.
WITH_CALLS = CHAT.replace(
    "message.content +", "message.content + (message.tool_calls | tojson if message.tool_calls else '') +"
)
WITH_CALLS = "{{ (tools | tojson if tools else '') }}" + WITH_CALLS


def text(rng) -> str:
    return "".join(rng.choices("cdefghijk", k=12))


def openai(rng):
    """https://platform.openai.com/docs/guides/direct-preference-optimization, and FineTunePreferenceRequestInput of its API."""
    better, worse = text(rng), text(rng)
    turns = [said("system", "be kind"), said("user", text(rng))]
    if rng.random() < 0.5:
        turns += [said("assistant", text(rng)), said("user", text(rng))]
    return {
        "input": {"messages": turns, "tools": [], "parallel_tool_calls": True},
        "preferred_output": [said("assistant", better)],
        "non_preferred_output": [said("assistant", worse)],
    }, [(better, worse)]


def openai_earlier(rng):
    """The earlier names of the outputs, in version 2.3.0 of OpenAI's API description."""
    row, pairs = openai(rng)
    names = {"preferred_output": "preferred_completion", "non_preferred_output": "non_preferred_completion"}
    return {names.get(key, key): value for key, value in row.items()}, pairs


def llamafactory_calls(rng):
    """LLaMA-Factory, data/README.md: sharegpt with function_call and observation turns. Answers as texts, as in older files."""
    better, worse = text(rng), text(rng)
    call = {"name": "look", "arguments": {"at": text(rng)}}
    turns = [turn("human", text(rng)), turn("function_call", json.dumps(call)), turn("observation", text(rng))]
    as_turns = rng.random() < 0.5
    chosen, rejected = (turn("gpt", one) if as_turns else one for one in (better, worse))
    tools = json.dumps([{"name": "look", "description": "looks", "parameters": {}}])
    return {"conversations": turns, "chosen": chosen, "rejected": rejected, "tools": tools}, [(better, worse)]


def swift_response(rng):
    """ms-swift, docs/source_en/Customization/Custom-dataset.md, RLHF: messages and rejected_response."""
    better, worse = text(rng), text(rng)
    turns = [said("system", "be kind"), said("user", text(rng)), said("assistant", better)]
    return {"messages": turns, "rejected_response": worse}, [(better, worse)]


def swift_messages(rng):
    """The same page: rejected_messages. Some rows of the set answer another question."""
    better, worse, asked = text(rng), text(rng), text(rng)
    other = text(rng) if rng.random() < 0.2 else asked
    return {
        "messages": [said("user", asked), said("assistant", better)],
        "rejected_messages": [said("user", other), said("assistant", worse)],
    }, [(better, worse) if asked == other else DIFFER]


def orca(rng):
    """https://huggingface.co/datasets/Intel/orca_dpo_pairs: system, question, chosen, rejected."""
    better, worse = text(rng), text(rng)
    system = rng.choice(["", "be kind"])
    return {"system": system, "question": text(rng), "chosen": better, "rejected": worse}, [(better, worse)]


def distilabel_orca(rng):
    """https://huggingface.co/datasets/argilla/distilabel-intel-orca-dpo-pairs, whose card leaves out rows with status tie."""
    better, worse = text(rng), text(rng)
    status = rng.choice(["unchanged", "swapped", "tie"])
    return {
        "system": "",
        "input": text(rng),
        "chosen": better,
        "rejected": worse,
        "generations": [worse, better],
        "order": ["rejected", "chosen"],
        "rating": [7.0, 7.0 if status == "tie" else 9.0],
        "status": status,
        "original_chosen": better,
        "original_rejected": worse,
        "chosen_score": 9.0,
        "in_gsm8k_train": False,
    }, [TIE if status == "tie" else (better, worse)]


def argilla_ratings(rng):
    """https://huggingface.co/datasets/argilla/ultrafeedback-binarized-preferences-cleaned: complete conversations, ratings."""
    better, worse, asked = text(rng), text(rng), text(rng)
    chosen, rejected = ([said("user", asked), said("assistant", one)] for one in (better, worse))
    return {
        "source": "evol_instruct",
        "prompt": asked,
        "chosen": chosen,
        "chosen-rating": 5.0,
        "chosen-model": "gpt-4",
        "rejected": rejected,
        "rejected-rating": 3.25,
        "rejected-model": "mpt",
    }, [(better, worse)]


def best_and_worst(answers):
    """The texts with the highest and the lowest number; TIE if all numbers are equal."""
    numbers = [number for _, number in answers]
    if min(numbers) == max(numbers):
        return TIE
    return next(t for t, n in answers if n == max(numbers)), next(t for t, n in answers if n == min(numbers))


def distilabel_ratings(rng):
    """https://distilabel.argilla.io, task UltraFeedback: instruction, generations and ratings."""
    answers = [(text(rng), rng.choice([1, 5])) for _ in range(2)]
    return {
        "instruction": text(rng),
        "generations": [one for one, _ in answers],
        "ratings": [rating for _, rating in answers],
        "rationales": ["", ""],
    }, [best_and_worst(answers)]


def ultrafeedback(rng):
    """https://huggingface.co/datasets/openbmb/UltraFeedback: ranked by overall_score, not by fine-grained_score."""
    answers = [(text(rng), score) for score in rng.sample([1.0, 6.5, 7.0, 8.5], 4)]
    completions = [
        {
            "model": f"model-{i}",
            "principle": "helpfulness",
            "response": answer,
            "annotations": {"helpfulness": {"Rating": str(5 - i), "Rationale": "", "Type": ["1"]}},
            "critique": "",
            "overall_score": score,
            "fine-grained_score": 5.0 - i,
        }
        for i, (answer, score) in enumerate(answers)
    ]
    row = {"source": "flan", "instruction": text(rng), "models": [], "completions": completions}
    return row | {"correct_answers": ["None"], "incorrect_answers": ["None"]}, [best_and_worst(answers)]


def ultrafeedback_annotations(rng):
    """The files of the same set before overall_score was added: the mean of the ratings, without those that are N/A."""
    answers, completions = [], []
    for _ in range(2):
        ratings = [rng.choice(["1", "3", "5", "N/A"]) for _ in range(3)] + ["4"]
        given = [int(rating) for rating in ratings if rating != "N/A"]
        answers.append((text(rng), sum(given) / len(given)))
        names = ("helpfulness", "honesty", "instruction_following", "truthfulness")
        annotations = {name: {"Rating": rating, "Rationale": ""} for name, rating in zip(names, ratings, strict=True)}
        completions.append({"model": "m", "response": answers[-1][0], "annotations": annotations})
    return {"source": "flan", "instruction": text(rng), "completions": completions}, [best_and_worst(answers)]


def nectar(rng):
    """https://huggingface.co/datasets/berkeley-nest/Nectar: seven answers with ranks from 1.0, and a dialogue as the prompt."""
    answers = [text(rng) for _ in range(7)]
    ranks = rng.sample(range(1, 8), 7)
    earlier = f"\n\nHuman: {text(rng)}\n\nAssistant: {text(rng)}" if rng.random() < 0.5 else ""
    row = {
        "prompt": f"{earlier}\n\nHuman: {text(rng)}\n\nAssistant: ",
        "answers": [
            {"answer": answer, "model": "m", "rank": float(rank)} for answer, rank in zip(answers, ranks, strict=True)
        ],
        "turns": 1,
        "num_responses": 7,
        "source": ["sharegpt"],
        "good_natured": True,
    }
    return row, [(answers[ranks.index(1)], answers[ranks.index(7)])]


def webgpt(rng):
    """https://huggingface.co/datasets/openai/webgpt_comparisons: the scores sum to 0, the better answer's is positive."""
    answers, score = [text(rng), text(rng)], rng.choice([-1.0, -0.5, 0.0, 0.25, 1.0])
    row = {"question": {"dataset": "eli5", "id": "x", "full_text": text(rng)}}
    for i, sign in enumerate((1, -1)):
        row |= {f"quotes_{i}": {"title": [], "extract": []}, f"answer_{i}": answers[i], f"score_{i}": sign * score}
    return row, [TIE if score == 0 else (answers[score < 0], answers[score > 0])]


def summaries(rng):
    """https://huggingface.co/datasets/openai/summarize_from_feedback, comparisons; the prompt as in TRL's tldr_preference.py."""
    answers, choice = [text(rng), text(rng)], rng.choice([0, 1])
    info = {"id": "t3", "post": text(rng), "title": text(rng), "subreddit": "tifu", "site": None, "article": None}
    return {
        "info": info,
        "summaries": [{"text": f" {one}", "policy": "sup4", "note": None} for one in answers],
        "choice": choice,
        "worker": "w",
        "batch": "batch9",
        "split": "train",
        "extra": {"confidence": None},
    }, [(answers[choice], answers[1 - choice])]


def oasst(rng):
    """Open-Assistant, oasst-data/oasst_data/schemas.py: trees of messages, of which those ready for export have ranks."""
    pairs = []

    def reply(role, depth, rank=None):
        number = 0 if depth == 4 else rng.choice([0, 1, 3])
        ranks = rng.sample(range(number), number)
        by_assistant = role == "prompter"
        texts = [text(rng) for _ in ranks]
        message = {"message_id": "m", "parent_id": None, "text": text(rng), "role": role, "rank": rank, "lang": "en"}
        message |= {"synthetic": False, "deleted": False, "labels": {}, "emojis": {}}
        if by_assistant and number > 1:
            pairs.append((texts[ranks.index(0)], texts[ranks.index(number - 1)]))
        message["replies"] = []
        for one, its_rank in zip(texts, ranks, strict=True):
            child = reply("assistant" if by_assistant else "prompter", depth + 1, its_rank if by_assistant else None)
            message["replies"].append(child | {"text": one})
        return message

    tree = {"message_tree_id": "t", "tree_state": "ready_for_export", "prompt": reply("prompter", 0)}
    return tree, pairs or [NO_RANKS]


def shp(rng):
    """https://huggingface.co/datasets/stanfordnlp/SHP: labels is 1 if A is preferred, 0 if B is."""
    a, b, label = text(rng), text(rng), rng.choice([0, 1])
    scores = {"score_A": 340 if label else 166, "score_B": 166 if label else 340}
    row = {"post_id": "qt3nxl", "domain": "askculinary_train", "history": text(rng), "human_ref_A": a, "human_ref_B": b}
    return row | scores | {"labels": label, "score_ratio": 2.0}, [(a, b) if label == 1 else (b, a)]


def pku(rng):
    """https://huggingface.co/datasets/PKU-Alignment/PKU-SafeRLHF: the better and the safer response, by their numbers."""
    answers, better, safer = [text(rng), text(rng)], rng.choice([0, 1]), rng.choice([0, 1])
    return {
        "prompt": text(rng),
        "prompt_source": "a",
        "response_0": answers[0],
        "response_1": answers[1],
        "is_response_0_safe": True,
        "is_response_1_safe": True,
        "better_response_id": better,
        "safer_response_id": safer,
    }, [(answers[safer], answers[1 - safer])]


def helpsteer2(rng):
    """https://huggingface.co/datasets/nvidia/HelpSteer2, preference: -3 (response 1 is much better) to 3 (response 2 is)."""
    one, two, strength = text(rng), text(rng), rng.choice([-3, -2, -1, 0, 1, 2, 3])
    asked = text(rng)
    if rng.random() < 0.5:
        asked += f"\n<extra_id_1>Assistant\n{text(rng)}\n<extra_id_1>User\n{text(rng)}"
    row = {"split": "train", "prompt": asked, "response_1": one, "response_2": two, "preference_strength": strength}
    row |= {"preference_statement": "", "preference_elaboration": "", "all_preferences_unprocessed": []}
    return row, [TIE if strength == 0 else (one, two) if strength < 0 else (two, one)]


def arena(rng):
    """https://huggingface.co/datasets/lmsys/chatbot_arena_conversations: two conversations and the winner.

    After the first turn, the conversations have different answers, so those of several turns have no common prompt.
    """
    a, b, asked = text(rng), text(rng), said("user", text(rng))
    winner = rng.choice(["model_a", "model_b", "tie", "tie (bothbad)"])
    conversations = [[asked, said("assistant", one)] for one in (a, b)]
    num_turns = rng.choice([1, 1, 2])
    if num_turns == 2:
        again = said("user", text(rng))
        conversations = [[*turns, again, said("assistant", text(rng))] for turns in conversations]
    row = {"question_id": "q", "model_a": "vicuna", "model_b": "gpt-4", "winner": winner, "judge": "arena_user_1"}
    row |= {"conversation_a": conversations[0], "conversation_b": conversations[1], "turn": num_turns, "anony": True}
    found = {"model_a": (a, b), "model_b": (b, a)}.get(winner, TIE)
    return row, [DIFFER if num_turns == 2 else found]


def arena_votes(rng):
    """https://huggingface.co/datasets/lmarena-ai/arena-human-preference-55k: lists of texts as JSON, and three labels."""
    a, b, vote, num_turns = text(rng), text(rng), rng.choice([0, 1, 2]), rng.choice([1, 1, 2])
    later = [text(rng)] if num_turns == 2 else []
    row = {"id": 30192, "model_a": "gpt-4", "model_b": "vicuna", "prompt": json.dumps([text(rng), *later])}
    row |= {"response_a": json.dumps([a, *later]), "response_b": json.dumps([b, *later])}
    row |= {f"winner_{name}": int(vote == i) for i, name in enumerate(("model_a", "model_b", "tie"))}
    return row, [DIFFER if num_turns == 2 else ((a, b), (b, a), TIE)[vote]]


def arena_parts(rng):
    """https://huggingface.co/datasets/lmarena-ai/arena-human-preference-140k: contents are lists of parts, and both_bad a tie."""
    row, found = arena(rng)
    for key in ("conversation_a", "conversation_b"):
        parts = [{"type": "text", "text": turn["content"], "image": None, "mimeType": None} for turn in row[key]]
        row[key] = [turn | {"content": [part]} for turn, part in zip(row[key], parts, strict=True)]
    row["winner"] = row["winner"].replace("tie (bothbad)", "both_bad")
    return row | {"evaluation_order": 1, "full_conversation": [{"user": None}], "is_code": False}, found


def argilla_responses(rng):
    """https://huggingface.co/datasets/argilla/ultrafeedback-binarized-preferences: instruction, and two rated responses."""
    better, worse = text(rng), text(rng)
    row = {"source": "flan", "instruction": text(rng), "chosen_response": better, "rejected_response": worse}
    return row | {"chosen_avg_rating": 4.5, "rejected_avg_rating": 2.25, "chosen_model": "gpt-4"}, [(better, worse)]


def alpaca_farm(rng):
    """https://huggingface.co/datasets/tatsu-lab/alpaca_farm, preferences: preference is 1 or 2, the number of the output."""
    one, two, preference = text(rng), text(rng), rng.choice([1, 2])
    row = {"instruction": text(rng), "input": rng.choice(["", text(rng)]), "output_1": one, "output_2": two}
    return row | {"preference": preference}, [(one, two) if preference == 1 else (two, one)]


@dataclass(frozen=True)
class Case:
    build: object
    format: str
    keys: DatasetFields = field(default_factory=DatasetFields)


ONE_IS_A = DatasetFields(label_values={"1": "a", "0": "b"})
CASES = [
    Case(openai, "openai_preference"),
    Case(openai_earlier, "openai_preference"),
    Case(llamafactory_calls, "sharegpt"),
    Case(swift_response, "ms_swift"),
    Case(swift_messages, "ms_swift"),
    Case(orca, "question_pair"),
    Case(distilabel_orca, "question_pair"),
    Case(argilla_ratings, "implicit_prompt"),
    Case(distilabel_ratings, "scored"),
    Case(ultrafeedback, "scored"),
    Case(ultrafeedback_annotations, "scored"),
    Case(nectar, "nectar"),
    Case(webgpt, "webgpt"),
    Case(summaries, "summarize_from_feedback"),
    Case(oasst, "oasst_tree"),
    Case(shp, "labelled_pair", ONE_IS_A),
    Case(pku, "labelled_pair", DatasetFields(label_key="safer_response_id")),
    Case(helpsteer2, "HelpSteer2"),
    Case(arena, "labelled_pair"),
    Case(arena_parts, "labelled_pair"),
    Case(arena_votes, "arena_votes"),
    Case(argilla_responses, "aligner"),
    Case(alpaca_farm, "labelled_pair", DatasetFields(label_values={"1": "a", "2": "b"})),
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))


def winner_and_loser(preference):
    """The letters of both completions of the only pair, without the end of the turn."""
    ((winner, loser),) = preference.pairs
    return tuple(preference.completions[number].tolist()[:12] for number in (winner, loser))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.build.__name__)
def test_the_pairs_and_counts_of_a_file_are_those_of_its_rows(case, tmp_path):
    rng = random.Random(case.build.__name__)
    rows, outcomes = [], []
    for _ in range(NUM_ROWS):
        row, found = case.build(rng)
        rows.append(row)
        outcomes += found
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    store = open_store(str(source), case.keys, Template(letter_tokenizer(), WITH_CALLS, {}), LENIENT, 1000)
    pairs = [tuple(map(ids, one)) for one in outcomes if isinstance(one, tuple)]
    left_out = Counter(one for one in outcomes if isinstance(one, str))
    assert store.format == case.format
    assert [winner_and_loser(preference) for preference in store] == pairs
    assert (store.counts.bad, store.counts.filtered) == ({}, dict(left_out))
    assert store.counts.rows == len(outcomes) and len(pairs) > 5
    if case.build in (distilabel_orca, webgpt, helpsteer2, arena, arena_parts, arena_votes, distilabel_ratings):
        assert left_out[TIE] > 2
