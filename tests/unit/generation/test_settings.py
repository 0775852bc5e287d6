"""Sampling and engine options: each has an effect or is refused."""

import pytest

from tandem.errors import ConfigError
from tandem.generation.generate import check_engine, name_models
from tandem.generation.records import EngineSettings, Prompt, Request, make_sampling

pytestmark = pytest.mark.usefixtures("of_a_command")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_samples": 2},
            "-n 2: without sampling, every completion of a prompt would be the same. Add --temperature 0.8.",
        ),
        ({"num_samples": 0}, "-n 0: give a number of completions from 1 to 4,096."),
        ({"top_p": 0.9}, "--top-p 0.9: has no effect without sampling. Add --temperature 0.8, or leave it out."),
        ({"seed": 1}, "--seed 1: has no effect without sampling. Add --temperature 0.8, or leave it out."),
        ({"temperature": -1.0}, "--temperature -1.0: give 0 (greedy) or a positive number, such as 0.8."),
        ({"temperature": float("nan")}, "--temperature nan: give 0 (greedy) or a positive number, such as 0.8."),
        ({"temperature": 1.0, "top_p": 0.0}, "--top-p 0.0: give a probability above 0 and up to 1, such as 0.95."),
        ({"temperature": 1.0, "seed": -1}, f"--seed -1: give an integer from 0 to {2**63 - 1}."),
        ({"max_new_tokens": 0}, "--max-new-tokens 0: give a number of tokens from 1."),
    ],
)
def test_an_option_that_is_wrong_or_without_effect_is_refused(options, message):
    with pytest.raises(ConfigError) as error:
        make_sampling(**options)
    assert str(error.value) == message


def test_greedy_settings_do_not_mention_a_seed():
    assert make_sampling().as_dict() == {"num_samples": 1, "max_new_tokens": 256, "temperature": 0.0}
    assert make_sampling(temperature=0.7, seed=5).as_dict() == {
        "num_samples": 1,
        "max_new_tokens": 256,
        "temperature": 0.7,
        "top_p": 1.0,
        "seed": 5,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "trt"}, "--engine trt: not an engine. Give transformers, vllm or http."),
        (
            {"name": "vllm"},
            "--engine vllm: vLLM needs a Python environment of its own. Give its interpreter: --vllm-python /path/to/bin/python.",
        ),
        (
            {"name": "vllm", "vllm_python": "/no/python"},
            "--vllm-python /no/python: no such file. Give the interpreter of the environment that has vLLM.",
        ),
        (
            {"name": "http"},
            "--engine http: which server? Give its address, such as --base-url http://localhost:8000/v1.",
        ),
        (
            {"name": "http", "base_url": "localhost:8000"},
            "--base-url localhost:8000: not a URL. Give one such as http://localhost:8000/v1.",
        ),
        (
            {"name": "http", "base_url": "http://localhost", "api_key_env": "NO_SUCH_KEY"},
            "--api-key-env NO_SUCH_KEY: this environment variable is not set. Set it to the key, or leave this out.",
        ),
        ({"base_url": "http://localhost"}, "--base-url has no effect with --engine transformers. Leave it out."),
        ({"vllm_python": "python"}, "--vllm-python has no effect with --engine transformers. Leave it out."),
        (
            {"name": "http", "base_url": "http://localhost", "batch_size": 4},
            "--batch-size has no effect with --engine http. Leave it out.",
        ),
        ({"batch_size": 0}, "--batch-size 0: give a number of sequences from 1, or leave it out."),
        ({"batching": "fast"}, "--batching fast: give auto, padded or continuous."),
    ],
)
def test_engine_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError) as error:
        check_engine(EngineSettings(**settings))
    assert str(error.value) == message


def test_a_model_is_not_compared_with_itself():
    with pytest.raises(ConfigError, match=r"^--compare embedded: the same as MODEL\. Give another model\.$"):
        name_models("embedded", "embedded", EngineSettings())


def test_random_keys_depend_on_seed_sample_ids_and_repeat_but_not_on_the_number_of_the_prompt():
    def key(seed=0, index=0, sample=0, ids=(1, 2), repeat=0):
        return Request(Prompt(index, "p:1", "Hi"), sample, ids, repeat).random_key(seed)

    assert key() == key(index=7)
    others = [key(), key(seed=1), key(sample=1), key(ids=(12,)), key(repeat=1)]
    assert len(set(others)) == 5


def test_a_path_of_a_model_is_written_in_one_way(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    [named] = name_models(f"{folder}/./", None, EngineSettings())
    assert named.name == str(folder)
    [served] = name_models("org/name/", None, EngineSettings(name="http", base_url="http://127.0.0.1:1"))
    assert served.name == "org/name/"
