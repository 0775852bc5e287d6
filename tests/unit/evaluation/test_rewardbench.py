"""RewardBench 1 and 2, scored as their authors do, with numbers worked out by hand."""

import io

import numpy as np
import pytest

from tandem.evaluation.rewardbench import (
    EXAMPLE_COUNTS,
    PRIOR_SETS,
    SECTIONS,
    ScoredPrompt,
    rewardbench_1,
    rewardbench_2,
    ties_score,
)
from tandem.evaluation.show import _Printer, _show_benchmark
from tandem.terminal.console import SafeConsole


def prompt(name, scores, num_correct=1, subset="Ties"):
    best = int(np.argmax(scores))
    return ScoredPrompt(subset, name, tuple(scores), num_correct, float(best < num_correct))


def test_every_subset_is_in_one_section():
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(EXAMPLE_COUNTS)


def test_subsets_count_in_their_section_by_the_published_numbers_of_examples():
    accuracy = {"math-prm": 1.0, "hep-cpp": 0.5, "alpacaeval-easy": 0.9}
    found = rewardbench_1(accuracy, dict.fromkeys(accuracy, 10))
    # math-prm counts 984, one language of code 164
    assert found.sections == {"Chat": pytest.approx(0.9), "Reasoning": pytest.approx((984 + 82) / 1148)}
    assert found.score == pytest.approx((0.9 + 1066 / 1148) / 2)


def test_sections_and_subsets_without_prompts_are_named_and_so_are_subsets_that_do_not_count():
    accuracy = dict.fromkeys(SECTIONS["Chat"][1:], 1.0) | {"shp": 0.5, "mine": 0.0}
    found = rewardbench_1(accuracy, dict.fromkeys(accuracy, 10))
    assert found.missing == (
        *("alpacaeval-easy", "Chat Hard", "Safety", "Reasoning"),
        *("anthropic_helpful", "anthropic_hhh", "summarize"),
    )
    assert found.uncounted == ("mine",)
    every = dict.fromkeys([*EXAMPLE_COUNTS, *PRIOR_SETS], 1.0)
    assert rewardbench_1(every, dict.fromkeys(every, 10)).missing == ()
    found = rewardbench_2([prompt("1", [1, 0], subset="Math"), prompt("ref:1", [1, 0], subset="ties")])
    assert found.missing == ("Factuality", "Precise IF", "Safety", "Focus")
    assert found.num_alone == 1


def test_prompts_of_ties_without_their_counterpart_are_counted():
    ids = ("ref:1", "tied:1", "ref:2", "tied:03")
    found = rewardbench_2([prompt(id, [2, 1, 0], 1 + (id[0] == "t"), subset="Ties") for id in ids])
    assert found.num_alone == 2
    out = io.StringIO()
    _show_benchmark(found, _Printer(SafeConsole(file=out, width=200)))
    said = " ".join(out.getvalue().split())
    assert "2 prompts of Ties have no counterpart in the data (ref:N and tied:N belong together), so the score" in said
    assert rewardbench_2([prompt("1", [1, 0], subset="Math")]).num_alone == 0


def test_prior_sets_count_half_a_section():
    accuracy = dict.fromkeys(PRIOR_SETS, 0.6) | {"shp": 0.2, "donotanswer": 1.0, "alpacaeval-easy": 1.0}
    found = rewardbench_1(accuracy, dict.fromkeys(accuracy, 10))
    assert found.sections["Prior Sets"] == pytest.approx(0.5)
    assert found.score == pytest.approx((1 + 1 + 0.5 * 0.5) / 2.5)


def test_rewardbench_2_is_the_mean_of_its_subsets():
    prompts = [
        prompt("1", [2, 1, 0], subset="Math"),
        prompt("2", [0, 1, 2], subset="Math"),
        prompt("3", [1, 0], subset="Focus"),
    ]
    found = rewardbench_2(prompts)
    assert found.subsets == {"Math": 0.5, "Focus": 1.0}
    assert (found.score, found.num_prompts) == (0.75, {"Math": 2, "Focus": 1})


def test_the_score_of_ties():
    # tied: correct 5 and 4 (spread 1), incorrect 2: gap 2, preferred. ref: 4 and 1: gap 3.
    good = [prompt("tied:0", [5, 4, 2], 2), prompt("ref:0", [4, 1])]
    assert ties_score(good) == pytest.approx(0.3 + 0.3 + 0.2 + 0.2 + 0.01 * np.tanh(2 / 1 - 1))
    # tied: correct 5 and 2 (spread 3), incorrect 1: gap 1, not preferred. ref: 0 and 1: gap -1, wrong.
    poor = [prompt("tied:1", [5, 2, 1], 2), prompt("ref:1", [0, 1])]
    assert ties_score(poor) == pytest.approx(0.3 + 0.01 * np.tanh(-1 / 3 - 1))
    both = 0.3 * 1 + 0.3 * 0.5 + 0.2 * 0.5 + 0.2 * 0.5 + 0.01 * (np.tanh(1) + np.tanh(-4 / 3)) / 2
    assert ties_score([*good, *poor]) == pytest.approx(both)


def test_ties_whose_correct_completions_score_the_same_are_preferred():
    # spread 0: the tanh term is that of infinity, or 0 where gap and spread are both 0
    assert ties_score([prompt("tied:0", [3, 3, 1], 2), prompt("ref:0", [2, 1])]) == pytest.approx(1.01)
    assert ties_score([prompt("tied:0", [3, 3, 3], 2), prompt("ref:0", [2, 1])]) == pytest.approx(0.3)


def test_the_number_of_a_tied_prompt_is_that_of_its_ref_prompt_however_it_is_written():
    given = [prompt("tied:07", [5, 4, 2], 2), prompt("ref:7", [4, 1])]
    assert ties_score(given) == pytest.approx(0.3 + 0.3 + 0.2 + 0.2 + 0.01 * np.tanh(2 / 1 - 1))
    with pytest.raises(ValueError, match="'7' is not ref:N or tied:N"):
        ties_score([prompt("7", [1, 0])])


def test_ties_without_ref_prompts_count_their_accuracy_only():
    assert ties_score([prompt("tied:0", [3, 2, 1], 2)]) == pytest.approx(0.3)
