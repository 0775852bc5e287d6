"""The engine vllm speaks JSON lines with a worker in another interpreter. Here it has a stub of the package."""

from types import SimpleNamespace

import pytest
from letters import END, letter_tokenizer
from vllm_stub import STUB, stub_python

from tandem.errors import ConfigError
from tandem.generation.records import Prompt, Request, make_sampling
from tandem.generation.vllm_engine import VllmEngine

pytestmark = pytest.mark.usefixtures("of_a_command")


def found(tmp_path, adapter=None):
    """The parts of a FoundModel that the engine reads."""
    return SimpleNamespace(
        target=SimpleNamespace(name="tiny", adapter=adapter),
        source=SimpleNamespace(folder=tmp_path),
        template=SimpleNamespace(tokenizer=letter_tokenizer()),
        max_tokens=8,
    )


def engine(tmp_path, source=STUB, **settings):
    python = stub_python(tmp_path / "environment", source)
    return VllmEngine(found(tmp_path), (END,), make_sampling(**settings), python)


def requests(*ids):
    return [Request(Prompt(i, f"p:{i + 1}", "x"), 0, one) for i, one in enumerate(ids)]


def test_answers_come_back_in_tokens_with_the_reason_they_ended(tmp_path):
    one = engine(tmp_path, max_new_tokens=3)
    answers = list(one.answers(requests((10, 11), (12, 13, 14), (10, 11, 12, 13, 14, 15, 16))))
    one.close()
    assert one.version == "vLLM 0.stub"
    # The tokenizer of letters puts spaces between tokens. Three letters fill the limit; a prompt of 7 leaves one of 8 positions.
    assert [(a.ids, a.text, a.finish) for a in answers] == [
        ((11, 10, END), "b a", "stop"),
        ((14, 13, 12), "e d c", "length"),
        ((16,), "g", "length"),
    ]


def test_a_block_of_requests_follows_another(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.generation.vllm_engine.BLOCK", 2)
    one = engine(tmp_path)
    assert [a.text for a in one.answers(requests((10,), (11,), (12,)))] == ["a", "b", "c"]
    one.close()


def test_an_environment_without_vllm_is_reported(tmp_path):
    with pytest.raises(ConfigError) as error:
        engine(tmp_path, None)
    assert str(error.value) == (
        f"--engine vllm: the process of {tmp_path}/environment/python failed: ModuleNotFoundError: No module named 'vllm'. "
        "Install vLLM there."
    )


def test_a_worker_that_dies_is_reported_with_its_last_words(tmp_path):
    dies = 'import os, sys\nprint("CUDA out of luck", file=sys.stderr, flush=True)\nos._exit(3)\n'
    with pytest.raises(ConfigError) as error:
        engine(tmp_path, dies)
    assert str(error.value) == (
        f"--engine vllm: the process of {tmp_path}/environment/python ended without an answer.\nCUDA out of luck"
    )


def test_an_interpreter_that_is_another_program_is_reported(tmp_path):
    with pytest.raises(ConfigError, match=r"does not answer as vllm_worker\.py does"):
        VllmEngine(found(tmp_path), (END,), make_sampling(), "/bin/echo")


def test_an_adapter_is_refused(tmp_path):
    with pytest.raises(ConfigError) as error:
        VllmEngine(found(tmp_path, adapter=tmp_path), (END,), make_sampling(), "python")
    assert str(error.value) == (
        "--engine vllm: tiny is an adapter. Export the run with --merged, or use --engine transformers."
    )
