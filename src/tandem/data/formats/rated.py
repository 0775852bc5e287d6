"""Reads rows with two or more completions, each with a rank or a score, or in a list of correct ones, as Preferences."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tandem.config.sections.datasets import DatasetFields
from tandem.data.formats.conversations import dialogue_turns
from tandem.data.formats.preference import (
    Completion,
    Preference,
    TextOrMessages,
    checked,
    completion_of,
    describe,
    ended_before_answer,
    field_of,
    messages_of,
    prompt_of,
    score_of,
    text_of,
)
from tandem.data.read.sources import RowError, SourceRow
from tandem.terminal.printable import counted

SCORE_KEYS = ("score", "reward", "overall_score")
SAMPLED_KEY = "completion_ids"
TEXT_KEYS = ("completion", "response", "text", "content")
# The keys of a list of completions, and those of a separate list with their scores.
SCORES_OF = {"completions": ("scores",), "responses": ("scores",), "generations": ("scores", "ratings", "rating")}
LIST_KEYS = tuple(SCORES_OF)
# UltraFeedback's mean of the ratings in `annotations`.
MEAN_RATING = "fine-grained_score"
OASST_ROLES = {"prompter": "user", "assistant": "assistant"}


def ranked(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of NeMo RL's PreferenceDataset: `context` with messages, `completions` with objects {rank, completion}.

    Lower ranks are better.
    """
    given = _completion_list(row, "completions", '{"rank": 0, "completion": "Yes."}')
    completions = _with_ranks(row, given, "completions", "completion")
    return checked(Preference(prompt_of(row, "context"), completions, row.place))


def nectar(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a Nectar row: `prompt`, a text or a dialogue that ends in "Assistant:", and `answers` with {answer, rank}.

    Lower ranks are better.
    """
    completions = _with_ranks(
        row, _completion_list(row, "answers", '{"answer": "Yes.", "rank": 1}'), "answers", "answer"
    )
    return checked(Preference(_dialogue_prompt(row, keys.prompt_key), completions, row.place))


def has_ranks(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) and "rank" in item for item in value)


def _dialogue_prompt(row: SourceRow, key: str) -> TextOrMessages:
    """Return a prompt. If it is the text of a dialogue, "Human: Q Assistant:", return its turns."""
    prompt = prompt_of(row, key)
    text = f"\n\n{prompt.strip()}" if isinstance(prompt, str) else ""
    if not text.startswith("\n\nHuman:") or not text.endswith("\n\nAssistant:"):
        return prompt
    turns = dialogue_turns(text.removesuffix("\n\nAssistant:"))
    return ended_before_answer(messages_of(turns, row, key), row, key)


def _with_ranks(row: SourceRow, given: list[Any], key: str, text_key: str) -> tuple[Completion, ...]:
    """Read completions {rank, TEXT_KEY}, with scores if they have them."""
    completions = []
    for i, item in enumerate(given):
        where = f"{key}[{i}]"
        rank = float_to_int(field_of(item, "rank", row, f"{where}."))
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise RowError(row.place, "bad rank", f"{where}.rank: {rank!r} is not a rank. Ranks are integers from 0.")
        text = completion_of(row, field_of(item, text_key, row, f"{where}."), f"{where}.{text_key}")
        completions.append(Completion(text, rank, _score(item, row, where)))
    return tuple(completions)


def float_to_int(number: Any) -> Any:
    """Return 2.0 as 2; return other values unchanged.

    Tables store an integer column as floats if a value is missing in any row.
    """
    return int(number) if isinstance(number, float) and number.is_integer() else number


def scored(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row with a prompt and scored completions. The completion with the highest score gets rank 0.

    The scores are fields of the completion objects, or a separate list `scores`, as in UltraFeedback.
    """
    there = [name for name in LIST_KEYS if name in row.value] or LIST_KEYS
    key = next((name for name in there if has_scores(row.value, name)), there[0])
    like = '{"completion": "Yes.", "score": 1}'
    given = _completion_list(row, key, like, texts=_scores_key(row.value, key) is not None)
    separate = _separate_scores(row, key, len(given))
    answers = []
    for i, item in enumerate(given):
        where = f"{key}[{i}]"
        own = _own_score(item, row, where) if isinstance(item, Mapping) else None
        if own is None and separate is None:
            raise RowError(
                row.place, "missing key", f"{where} has no score (or reward). Add one, or remove the completion."
            )
        if own is not None and separate is not None and own != separate[i]:
            name = f"{_scores_key(row.value, key)}[{i}]"
            message = f"{where}: its score is {own:g}, but {name} is {separate[i]:g}. Remove one of them."
            raise RowError(row.place, "bad score", message)
        score = own if separate is None else separate[i]
        text, name = item, where
        if isinstance(item, Mapping):
            found = next((name for name in TEXT_KEYS if name in item), TEXT_KEYS[0])
            text, name = field_of(item, found, row, f"{where}."), f"{where}.{found}"
        answer = completion_of(row, text, name)
        answers.append((answer, score, _sampled(item, answer, row, where)))
    order = sorted({score for _, score, _ in answers}, reverse=True)
    completions = tuple(Completion(answer, order.index(score), score, ids) for answer, score, ids in answers)
    return checked(Preference(prompt_of(row, _prompt_key(row, keys)), completions, row.place))


def _sampled(item: Any, answer: TextOrMessages, row: SourceRow, where: str) -> tuple[int, ...] | None:
    """Return the token ids of a completion that `tandem generate` sampled; None if it has none."""
    ids = item.get(SAMPLED_KEY) if isinstance(item, Mapping) else None
    if ids is None:
        return None
    if not isinstance(answer, str):
        message = f"{where}.{SAMPLED_KEY}: only a completion of plain text can have token ids. Remove them."
        raise RowError(row.place, "bad token ids", message)
    if not isinstance(ids, list) or not ids or not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        what = describe(ids) if not isinstance(ids, list) else "a list with another value" if ids else "an empty list"
        message = f"{where}.{SAMPLED_KEY}: {what}, not a list of token ids. Correct it, or remove it."
        raise RowError(row.place, "bad token ids", message)
    return tuple(ids)


def best_of_n(row: SourceRow, keys: DatasetFields) -> Preference:
    """RewardBench 2: a prompt, a list of correct completions and a list of incorrect ones, as texts."""
    completions: list[Completion] = []
    for rank, key in enumerate((keys.chosen_key, keys.rejected_key)):
        texts = field_of(row.value, key, row)
        if not isinstance(texts, list) or not texts:
            what = "an empty list" if texts == [] else describe(texts)
            raise RowError(row.place, "wrong type", f"{key}: {what}, not a list of completions.")
        completions += [Completion(completion_of(row, text, f"{key}[{i}]"), rank) for i, text in enumerate(texts)]
    num_correct = sum(one.rank == 0 for one in completions)
    _check_number(
        row, "num_correct", num_correct, f"{keys.chosen_key} has {counted(num_correct, 'correct completion')}"
    )
    total = f"{keys.chosen_key} and {keys.rejected_key} have {counted(len(completions), 'completion')}"
    _check_number(row, "total_completions", len(completions), total)
    return checked(Preference(prompt_of(row, keys.prompt_key), tuple(completions), row.place))


def _check_number(row: SourceRow, key: str, count: int, there_are: str) -> None:
    """Raise a RowError if num_correct or total_completions of RewardBench 2 is not the number of these completions."""
    given = row.value.get(key)
    if given is not None and (isinstance(given, bool) or given != count):
        raise RowError(row.place, f"wrong {key}", f"{key}: {describe(given)}, and {there_are}. Correct one of them.")


def is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value)


def has_scores(row: Mapping[str, Any], key: str) -> bool:
    """Whether each completion in the list `row[key]` has a score, as a field of the completion or in the list `scores`."""
    items = row.get(key)
    if not isinstance(items, list) or not items:
        return False
    if isinstance(row.get(_scores_key(row, key) or ""), list):
        return all(isinstance(item, str | list | Mapping) for item in items)
    names = (*SCORE_KEYS, MEAN_RATING, "annotations")
    return all(isinstance(item, Mapping) and any(name in item for name in names) for item in items)


def _prompt_key(row: SourceRow, keys: DatasetFields) -> str:
    """Return the key that holds the prompt.

    If prompt_key is not configured, and the row has `instruction` or `input` but no `prompt`, return that key.
    """
    is_default = keys.prompt_key == DatasetFields.model_fields["prompt_key"].default
    others = [key for key in ("prompt", "instruction", "input") if key in row.value]
    return others[0] if is_default and others else keys.prompt_key


def _scores_key(row: Mapping[str, Any], key: str) -> str | None:
    """Return the key of a separate list with the scores of the completions under `key`, or None if the row has none."""
    return next((name for name in SCORES_OF[key] if row.get(name) is not None), None)


def _separate_scores(row: SourceRow, key: str, count: int) -> list[float] | None:
    """Return the list `scores`, or None if the row has no such list. Raise a RowError unless it has one score per completion."""
    name = _scores_key(row.value, key)
    if name is None:
        return None
    given = row.value[name]
    if not isinstance(given, list):
        raise RowError(
            row.place, "wrong type", f"{name}: {describe(given)}, not a list with a score for each of {key}."
        )
    if len(given) != count:
        raise RowError(
            row.place, "bad score", f"{name}: {len(given)} scores for {count} {key}. Give one score for each."
        )
    scores = [score_of(value, row, f"{name}[{i}]") for i, value in enumerate(given)]
    missing = next((i for i, score in enumerate(scores) if score is None), None)
    if missing is not None:
        raise RowError(row.place, "null", f"{name}[{missing}] is null. Give it a value.")
    return [score for score in scores if score is not None]


def _completion_list(row: SourceRow, key: str, like: str, *, texts: bool = False) -> list[Any]:
    """Return the list of two or more completions under `key`.

    `like`: an example of a valid completion object, for error messages. `texts`: whether a completion may also be a text
    or a list of messages.
    """
    given = field_of(row.value, key, row)
    if not isinstance(given, list):
        raise RowError(row.place, "wrong type", f"{key}: {describe(given)}, not a list of completions such as {like}.")
    if len(given) < 2:
        message = f"{key}: a list of {len(given)}, but a preference needs two or more completions."
        raise RowError(row.place, "one completion", message)
    for i, item in enumerate(given):
        if not isinstance(item, Mapping) and not (texts and isinstance(item, str | list)):
            raise RowError(row.place, "wrong type", f"{key}[{i}]: {describe(item)}, not an object such as {like}.")
    return given


def _own_score(item: Mapping[str, Any], row: SourceRow, where: str) -> float | None:
    """Return the score of a completion. Without one, return the mean of its ratings, which UltraFeedback gives."""
    own = _score(item, row, where, SCORE_KEYS)
    if own is None:
        own = score_of(item.get(MEAN_RATING), row, f"{where}.{MEAN_RATING}")
    annotations = item.get("annotations")
    if own is not None or not isinstance(annotations, Mapping):
        return own
    ratings = []
    for aspect in annotations.values():
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # N/A
            ratings.append(float(aspect["Rating"]))
    return score_of(sum(ratings) / len(ratings), row, f"{where}.annotations") if ratings else None


def _score(
    item: Mapping[str, Any], row: SourceRow, where: str, names: tuple[str, ...] = ("score", "reward")
) -> float | None:
    # A table has every column in every row, with null for missing values.
    given = {name: score_of(item.get(name), row, f"{where}.{name}") for name in names}
    (first, score), *others = [(name, score) for name, score in given.items() if score is not None] or [("", None)]
    for other, value in others:
        if value != score:
            message = f"{where}: {first} is {score:g}, but {other} is {value:g}. Remove one of them."
            raise RowError(row.place, "bad score", message)
    return score


def webgpt(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a row of WebGPT comparisons: `question`, `answer_0`, `answer_1`, and their scores `score_0` and `score_1`.

    The answer with the higher score is better. Equal scores are a tie.
    """
    question = field_of(row.value, "question", row)
    if isinstance(question, Mapping):
        prompt: TextOrMessages = text_of(row, field_of(question, "full_text", row, "question."), "question.full_text")
    else:
        prompt = prompt_of(row, "question")
    answers = [completion_of(row, field_of(row.value, key, row), key) for key in ("answer_0", "answer_1")]
    scores = [score_of(field_of(row.value, key, row), row, key) or 0.0 for key in ("score_0", "score_1")]
    completions = tuple(Completion(answers[i], int(scores[i] < scores[1 - i]), scores[i]) for i in (0, 1))
    return checked(Preference(prompt, completions, row.place))


def summarize_from_feedback(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a comparison of summarize_from_feedback: `info` about the post or article, two `summaries`, and `choice`.

    `choice` is the index of the better summary. The prompt is the post with its title and subreddit, and ends in "TL;DR:".
    """
    info = field_of(row.value, "info", row)
    if not isinstance(info, Mapping):
        raise RowError(row.place, "wrong type", f"info: {describe(info)}, not an object with a post or an article.")
    summaries = _completion_list(row, "summaries", '{"text": "Short."}')
    choice = float_to_int(field_of(row.value, "choice", row))
    if not isinstance(choice, int) or isinstance(choice, bool) or not 0 <= choice < len(summaries):
        message = f"choice: {choice!r} is not the index of one of {len(summaries)} summaries."
        raise RowError(row.place, "bad label", message)
    texts = [
        text_of(row, field_of(summary, "text", row, f"summaries[{i}]."), f"summaries[{i}].text").strip()
        for i, summary in enumerate(summaries)
    ]
    completions = tuple(Completion(text, int(i != choice)) for i, text in enumerate(texts))
    return checked(Preference(_post(row, info), completions, row.place))


def _post(row: SourceRow, info: Mapping[str, Any]) -> str:
    """Return the prompt of a comparison of summaries. An article of a newspaper has no subreddit."""
    labels = {"subreddit": "SUBREDDIT: r/", "title": "TITLE: ", "post": "POST: ", "article": ""}
    given = {name: text_of(row, info[name], f"info.{name}") for name in labels if info.get(name) is not None}
    if not any(given.get(name, "").strip() for name in ("post", "article")):
        raise RowError(row.place, "empty prompt", "info has no post and no article.")
    parts = [f"{labels[name]}{text.strip()}" for name, text in given.items() if text.strip()]
    return "\n\n".join([*parts, "TL;DR:"])


def is_tree(value: Any) -> bool:
    return isinstance(value, Mapping) and "replies" in value


def oasst_tree(row: SourceRow, keys: DatasetFields) -> Preference:
    """Read a tree of Open Assistant: `prompt` is a message {role, text, replies}, and `message_tree_id` its name.

    The completions are the first replies of the assistant of which two or more have a rank; lower ranks are better. In a
    file, each prompt of a tree with ranked replies becomes a preference.
    """
    tree = next(split_tree(row, keys))
    turns, node = [], tree.value[keys.prompt_key]
    while True:
        where = f"{keys.prompt_key}{'.replies[...]' * len(turns)}"
        turns.append({"role": _oasst_role(node, row, where), "content": field_of(node, "text", row, f"{where}.")})
        replies = node["replies"]
        if len(replies) > 1:
            break
        (node,) = replies
    prompt = ended_before_answer(messages_of(turns, row, keys.prompt_key), row, keys.prompt_key)
    completions = [{"rank": reply["rank"], "text": reply.get("text")} for reply in replies]
    return checked(Preference(prompt, _with_ranks(row, completions, "replies", "text"), row.place))


def split_tree(row: SourceRow, keys: DatasetFields) -> Iterator[SourceRow]:
    """Yield a row for each prompt of a tree with two or more ranked replies: the turns that lead to it, and its replies.

    Raise a RowError if there is no such prompt.
    """
    root = field_of(row.value, keys.prompt_key, row)
    if not isinstance(root, Mapping):
        raise RowError(row.place, "wrong type", f"{keys.prompt_key}: {describe(root)}, not a message with replies.")
    pending: list[tuple[Mapping[str, Any], ...]] = [(root,)]  # paths from the root to a message
    found = False
    while pending:
        path = pending.pop()
        given = path[-1].get("replies")
        replies = [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
        ranked_replies = [
            {**reply, "replies": []}
            for reply in replies
            if reply.get("role") == "assistant" and reply.get("rank") is not None and not reply.get("deleted")
        ]
        if len(ranked_replies) > 1:
            found = True
            branch: list[Any] = ranked_replies
            for message in reversed(path):
                branch = [{**message, "replies": branch}]
            yield replace(row, value={**row.value, keys.prompt_key: branch[0]})
        pending += [(*path, reply) for reply in reversed(replies)]
    if not found:
        message = "no message of the tree has two or more replies of the assistant with a rank."
        raise RowError(row.place, "no ranked replies", message, kind="filtered")


def _oasst_role(node: Mapping[str, Any], row: SourceRow, where: str) -> str:
    role = field_of(node, "role", row, f"{where}.")
    if not isinstance(role, str) or role not in OASST_ROLES:
        raise RowError(row.place, "unknown role", f"{where}.role: {role!r} is not one of {', '.join(OASST_ROLES)}.")
    return OASST_ROLES[role]
