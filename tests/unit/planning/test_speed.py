"""The estimated speed compared with the committed measurements on an H200."""

import json
from pathlib import Path

import pytest
from shapes import measured_pairs, model_folder

from tandem.config.schema import Config
from tandem.model.files.source import find_source
from tandem.model.load import empty_model
from tandem.planning.cards import Card, find_card
from tandem.planning.speed import (
    COMPUTED_RANGE,
    HOST_SECONDS_PER_LAYER,
    HOST_SECONDS_PER_UPDATE,
    MEASURED_RANGE,
    ModelSize,
    Range,
    Work,
    size_of,
    start_range,
    time_range,
    training_seconds,
    useful_flops,
)

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
SMALL = ModelSize(num_weights=10, num_trunk=8, hidden=2, vocabulary=5)


def committed(name: str) -> list[dict]:
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def measured_rows() -> list[tuple[str, str, int, dict, float]]:
    """For each committed run: its name, shape, pack length, settings of the policy, and the measured pairs per second."""
    rows = []
    for one in [*committed("train"), *committed("versus_trl")]:
        words = one["options"].split()
        given = dict(zip(words[::2], words[1::2], strict=True))
        is_bfloat16 = given.get("--settings") == "bfloat16" or "--weights" in given
        policy: dict = {"activation_checkpointing": given.get("--checkpointing", "none")}
        policy["optimizer"] = {"state_dtype": given.get("--state-dtype", "bfloat16" if is_bfloat16 else "float32")}
        policy |= {"lora": {"enabled": True}} if "--lora" in given else {}
        policy |= {"weights": "bfloat16_stochastic"} if is_bfloat16 else {}
        speed = one.get("pairs_per_second") or one["tandem"]["pairs_per_second"]
        length = int(given.get("--pack-length", 16384))
        rows.append((one["name"], given.get("--shape", "qwen2.5-1.5b"), length, policy, speed))
    return rows


@pytest.fixture(scope="module")
def sizes(tmp_path_factory) -> dict[str, ModelSize]:
    folder = tmp_path_factory.mktemp("shapes")
    names = ("qwen2.5-1.5b", "llama3.1-8b")
    sources = [
        find_source("policy.model_name", str(model_folder(n, folder / n)), None, needs_weights=False) for n in names
    ]
    return dict(zip(names, map(size_of, map(empty_model, sources)), strict=True))


def test_the_sizes_of_a_model_are_those_of_its_layers(sizes):
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
    assert sizes["llama3.1-8b"] == ModelSize(
        num_weights=32 * layer + 2 * 128_256 * 4096 + 4096,
        num_trunk=32 * layer,
        hidden=4096,
        vocabulary=128_256,
        num_layers=32,
    )


@pytest.mark.parametrize(("name", "shape", "length", "policy", "measured"), measured_rows())
def test_the_estimate_is_within_8_percent_of_every_committed_speed(name, shape, length, policy, measured, sizes):
    config = Config.model_validate({"policy": policy})
    size = sizes[shape]
    seconds = training_seconds(size, measured_pairs(size), length, config, find_card("h200-141gb"))
    assert 1 / seconds == pytest.approx(measured, rel=0.08), name
    low, high = (factor * seconds for factor in MEASURED_RANGE)
    assert low < 1 / measured < high


def test_operations_of_a_step_by_hand():
    # 6 x 8 weights x 3 tokens in the layers, 6 x 2 x 5 x 2 scored tokens in the head
    assert useful_flops(SMALL, Work(tokens=3, scored=2)) == 144 + 120


def test_work_adds_up_by_tokens_and_positions():
    both = Work(tokens=60, scored=10, attention=1.0, fill=0.6) + Work(tokens=40, scored=30, attention=1.5, fill=0.4)
    assert both == Work(tokens=100, scored=40, attention=1.2, fill=0.5)  # 100 positions each


def seconds_on(card: Card, row_tokens: int = 16384, **policy) -> float:
    size = ModelSize(1_500_000_000, num_trunk=1_300_000_000, hidden=1536, vocabulary=151_936, num_layers=28)
    config = Config.model_validate({"policy": policy})
    return training_seconds(size, Work(tokens=1e6, scored=5e5), row_tokens, config, card)


def test_a_card_with_half_the_peak_takes_twice_as_long():
    whole, half = Card("a", 1, 800.0), Card("b", 1, 400.0)
    assert seconds_on(half) == pytest.approx(2 * seconds_on(whole), rel=0.001)


def test_rows_that_are_too_short_to_keep_the_gpu_busy_cost_time():
    """The host starts the kernels of each row, in a time that does not depend on its length."""
    card = find_card("h200-141gb")
    rows = 1e6 / 1024
    assert seconds_on(card, 1024) == pytest.approx(rows * 28 * HOST_SECONDS_PER_LAYER, rel=0.01)
    assert seconds_on(card, 1024) == pytest.approx(2 * seconds_on(card, 2048), rel=0.01)
    assert seconds_on(card, 16384) == pytest.approx(seconds_on(card, 32768), rel=0.001)


def test_updates_cost_time_where_the_host_sets_the_speed():
    card, size = find_card("h200-141gb"), ModelSize(10**8, 10**8, 512, 1000, num_layers=30)
    work, config = Work(tokens=1024, scored=512), Config()
    alone, updated = (training_seconds(size, work, 1024, config, card, num_updates=num) for num in (0, 1))
    assert updated - alone == pytest.approx(HOST_SECONDS_PER_UPDATE, rel=0.01)


def test_the_range_is_wider_where_nothing_was_measured():
    large, small = ModelSize(10**9, 1, 1, 1), ModelSize(10**8, 1, 1, 1)
    assert time_range(100, large, find_card("h200-141gb")) == Range(*(100 * factor for factor in MEASURED_RANGE))
    assert time_range(100, small, find_card("h200-141gb")) == Range(*(100 * factor for factor in COMPUTED_RANGE))
    assert time_range(100, large, find_card("a100-80gb")) == Range(*(100 * factor for factor in COMPUTED_RANGE))


def test_the_measured_starts_lie_in_the_range():
    for billions, warm, empty in ((1.54, 23, 69), (8.03, 36, 132)):
        found = start_range(ModelSize(int(billions * 1e9), 1, 1, 1))
        assert found.low == pytest.approx(warm, abs=1)
        assert found.high == pytest.approx(empty, abs=4)
