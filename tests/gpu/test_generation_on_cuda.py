"""Generation on a GPU: padded and continuous batches, and samples that do not depend on the batch."""

import pytest
import torch
from models import model_folder

from tandem.generation.generate import generate
from tandem.generation.records import EngineSettings, make_sampling

pytestmark = pytest.mark.gpu
PROMPTS = ["Hi", "How far is the moon from here, and why?", "A short story"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = {"hidden_size": 64, "head_dim": 16, "initializer_range": 0.3, "tie_word_embeddings": False}
    return model_folder(tmp_path_factory.mktemp("model"), "llama", **sizes)


def ids(folder, prompts=PROMPTS, *, batch_size=None, batching="padded", **sampling):
    settings = make_sampling(max_new_tokens=12, **sampling)
    engine = EngineSettings(batch_size=batch_size, batching=batching)
    found = generate(str(folder), prompts, sampling=settings, engine=engine)
    return {one["prompt"]: [c["completion_ids"] for c in one["completions"]] for one in found.records}


def test_batches_give_the_tokens_of_one_prompt_at_a_time(folder):
    alone = ids(folder, batch_size=1)
    assert ids(folder) == alone
    assert ids(folder, batching="continuous") == alone


def test_a_seed_gives_the_same_tokens_in_any_batch_size_and_order(folder):
    sampled = {"temperature": 1.0, "num_samples": 4, "seed": 2}
    first = ids(folder, **sampled)
    assert ids(folder, PROMPTS[::-1], batch_size=3, **sampled) == first


def test_continuous_batching_samples_every_completion(folder):
    found = ids(folder, batching="continuous", temperature=1.0, num_samples=4)
    assert all(len(several) == 4 for several in found.values())


def test_the_memory_is_given_back_between_two_models(folder):
    before = torch.cuda.memory_allocated()  # what earlier tests in this process keep
    ids(folder)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < before + 2**24
