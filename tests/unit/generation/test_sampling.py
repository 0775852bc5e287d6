"""Tokens are chosen by inverting the cumulative distribution at a number that belongs to the request."""

import torch

from tandem.generation.records import Prompt, Request, make_sampling
from tandem.generation.sampling import choose_tokens, random_numbers
from tandem.generation.text import TextStream, stop_ids

LOGITS = torch.tensor([0.2, 0.5, 0.3]).log()


def chosen(*numbers, temperature=1.0, top_p=1.0):
    rows = LOGITS.expand(len(numbers), -1)
    found = choose_tokens(rows, torch.tensor(numbers, dtype=torch.float64), temperature=temperature, top_p=top_p)
    return found.tolist()


def test_a_number_chooses_the_token_whose_share_of_the_cumulative_distribution_it_is_in():
    assert chosen(0.0, 0.1, 0.21, 0.69, 0.71, 1 - 2**-53) == [0, 0, 1, 1, 2, 2]


def test_top_p_keeps_the_most_probable_tokens_that_reach_it():
    # 0.5 alone is below 0.6, so 0.3 is kept too: 5/8 and 3/8 of the numbers. Token 0 is never chosen.
    assert chosen(0.0, 0.62, 0.63, 1 - 2**-53, top_p=0.6) == [1, 1, 2, 2]
    assert chosen(0.0, 0.99, top_p=0.1) == [1, 1]


def test_a_low_temperature_prefers_the_most_probable_token():
    assert chosen(0.01, 0.99, temperature=0.05) == [1, 1]


def test_the_frequencies_of_many_numbers_are_the_probabilities():
    numbers = torch.rand(20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = choose_tokens(LOGITS.expand(20_000, -1), numbers, temperature=1.0, top_p=1.0)
    shares = found.bincount(minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.2, 0.5, 0.3]), atol=0.012, rtol=0)


def test_the_numbers_of_a_request_do_not_depend_on_the_batch_or_on_how_many_are_drawn():
    a, b = (Request(Prompt(i, "p", "x"), 0, ids) for i, ids in enumerate([(1, 2), (3,)]))
    sampling = make_sampling(temperature=1.0, seed=4)
    both, alone = random_numbers([b, a], sampling, 8), random_numbers([a], sampling, 5)
    assert torch.equal(both[1, :5], alone[0])
    assert not torch.equal(both[0], both[1])


def test_stop_tokens_are_those_of_the_template_the_tokenizer_and_the_model():
    class Tokenizer:
        eos_token_id = 2

    class Own:
        eos_token_id = [2, 9]

    assert stop_ids(Tokenizer(), 7, Own()) == (7, 2, 9)
    assert stop_ids(Tokenizer(), None) == (2,)


def test_characters_of_several_tokens_are_streamed_when_they_are_complete():
    class Bytes:
        def decode(self, ids):
            return bytes(ids).decode("utf-8", "replace")

    pieces = []
    stream = TextStream(Bytes(), (0,), pieces.append)
    for id in [*"é!".encode(), 0xE2, 0]:
        stream.add(id)
    stream.end()
    assert pieces == ["é", "!", "\N{REPLACEMENT CHARACTER}"]
