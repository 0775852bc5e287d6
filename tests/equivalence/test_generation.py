"""Generation in batches: the same tokens as one prompt at a time, as plain transformers, and as in any other order."""

import warnings
from pathlib import Path

import pytest
import torch
from adapters import trained_adapter, with_adapter
from models import model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.errors import ConfigError, DataError
from tandem.generation.generate import generate
from tandem.generation.records import EngineSettings, make_sampling

pytestmark = pytest.mark.usefixtures("of_a_command")

PROMPTS = [
    "Hi",
    "How far is the moon from here, and why?",
    "A short story",
    "Tell me all about every colour of the sea.",
]
TOKENS = 10
# Large weights, so that answers differ and every visible token affects them.
LARGE = {"initializer_range": 0.3, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"), "llama", **LARGE)


def ids(folder, prompts=PROMPTS, *, batch_size=None, batching="auto", **sampling) -> dict[str, list[list[int]]]:
    settings = make_sampling(**{"max_new_tokens": TOKENS, **sampling})
    engine = EngineSettings(batch_size=batch_size, batching=batching)
    found = generate(str(folder), prompts, sampling=settings, engine=engine)
    return {one["prompt"]: [c["completion_ids"] for c in one["completions"]] for one in found.records}


def plain(model, folder, prompt) -> list[int]:
    """The greedy answer of transformers to one prompt, with its own chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    prompt_ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
    found = model.generate(
        prompt_ids, attention_mask=torch.ones_like(prompt_ids), max_new_tokens=TOKENS, do_sample=False, eos_token_id=2
    )
    return found[0, prompt_ids.shape[1] :].tolist()


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "gpt_neox"])
def test_greedy_batches_give_the_tokens_of_one_prompt_at_a_time_with_plain_transformers(tmp_path, architecture):
    folder = model_folder(tmp_path, architecture, **LARGE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {prompt: [plain(model, folder, prompt)] for prompt in PROMPTS}
    assert len({tuple(one[0]) for one in expected.values()}) == len(PROMPTS)
    assert ids(folder) == expected


def test_settings_in_the_folder_of_the_model_do_not_change_what_is_generated(tmp_path, folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.update(repetition_penalty=5.0, do_sample=True, temperature=3.0, max_length=3)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert ids(tmp_path) == ids(folder)


def test_a_seed_gives_the_same_tokens_in_any_batch_size_and_order(folder):
    sampled = {"temperature": 1.0, "top_p": 0.95, "num_samples": 3, "seed": 5}
    first = ids(folder, **sampled)
    assert len({tuple(one) for several in first.values() for one in several}) == 3 * len(PROMPTS)
    assert ids(folder, batch_size=1, **sampled) == first
    assert ids(folder, PROMPTS[::-1], batch_size=5, **sampled) == first
    assert ids(folder, PROMPTS[1:2], **sampled) == {PROMPTS[1]: first[PROMPTS[1]]}
    assert ids(folder, **{**sampled, "seed": 6}) != first


def test_fewer_samples_or_tokens_are_the_beginning_of_more(folder):
    sampled = {"temperature": 1.0, "seed": 5}
    many = ids(folder, num_samples=3, **sampled)
    assert ids(folder, num_samples=2, **sampled) == {prompt: several[:2] for prompt, several in many.items()}
    short = ids(folder, max_new_tokens=4, **sampled)
    assert short == {prompt: [several[0][:4]] for prompt, several in many.items()}


def test_repeated_prompts_get_different_samples(folder):
    found = generate(str(folder), ["Hi", "Hi"], sampling=make_sampling(temperature=1.0, max_new_tokens=TOKENS)).records
    assert found[0]["completions"][0]["completion_ids"] != found[1]["completions"][0]["completion_ids"]


def test_a_completion_ends_with_the_end_of_turn_which_its_text_does_not_show(folder):
    # With a high temperature every token is equally probable, 2 (the end of turn) is one of 2,048.
    limit = 400
    found = generate(
        str(folder), ["Hi"], sampling=make_sampling(temperature=1e6, num_samples=16, max_new_tokens=limit, seed=1)
    )
    completions = found.records[0]["completions"]
    ended = [one for one in completions if one["finish"] == "stop"]
    assert ended and len(ended) < 16
    assert all(one["completion_ids"][-1] == 2 and "<|im_end|>" not in one["completion"] for one in ended)
    assert all(
        len(one["completion_ids"]) == limit and 2 not in one["completion_ids"]
        for one in completions
        if one not in ended
    )


@pytest.mark.slow  # transformers reserves gigabytes for its cache
def test_continuous_batching_gives_the_same_greedy_tokens(folder):
    assert ids(folder, batching="continuous") == ids(folder, batching="padded")


def test_an_adapter_is_applied_without_warnings_of_libraries(tmp_path, folder):
    adapter = trained_adapter(folder, tmp_path / "adapter")
    AutoTokenizer.from_pretrained(folder).save_pretrained(adapter)
    model = with_adapter(folder, adapter)
    expected = {prompt: [plain(model, folder, prompt)] for prompt in PROMPTS}
    with warnings.catch_warnings(action="error", category=FutureWarning):
        assert ids(adapter) == expected
    assert expected != ids(folder)


def test_an_answer_ends_at_the_longest_sequence_of_the_model_and_a_longer_prompt_is_refused(tmp_path):
    short = model_folder(tmp_path, "llama", max_position_embeddings=24, **LARGE)
    num_prompt_tokens = 24 - len(ids(short, ["Hi"], max_new_tokens=99)["Hi"][0])
    assert 0 < num_prompt_tokens < 24
    both = ids(short, ["Hi", "Hi there now"], max_new_tokens=99)
    assert both["Hi"] == ids(short, ["Hi"], max_new_tokens=99)["Hi"]
    with pytest.raises(DataError) as error:
        ids(short, ["Hi", "Hi there " * 12])
    assert str(error.value).startswith("prompts[1]: the prompt has ")
    assert str(error.value).endswith(f" tokens, and {short} is made for at most 24 with the answer. Shorten it.")


def test_messages_without_a_template_are_refused_and_plain_text_is_continued(folder):
    engine = EngineSettings(chat_template="none")
    with pytest.raises(DataError) as error:
        generate(str(folder), [[{"role": "user", "content": "Hi"}]], engine=engine)
    assert str(error.value) == (
        "prompts[0]: the prompt is a list of messages, but there is no chat template to render it. Set --chat-template "
        "FILE.jinja, or use prompts of plain text."
    )
    [record] = generate(str(folder), ["Hi"], engine=engine, sampling=make_sampling(max_new_tokens=3)).records
    assert record["completions"][0]["completion_ids"] != ids(folder, ["Hi"], max_new_tokens=3)["Hi"][0]


def test_a_template_that_is_missing_is_named_by_its_option(folder):
    with pytest.raises(ConfigError) as error:
        generate(str(folder), ["Hi"], engine=EngineSettings(chat_template="no.jinja"))
    assert str(error.value) == "--chat-template no.jinja: there is no such file. Check the path."
