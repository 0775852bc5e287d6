"""Everything that a run computes is compiled before its first step."""

import pytest
from compiling import graphs_during_a_run

RUNS = {
    "all weights": [],
    "two rows at a time": ["policy.packing.packs_per_micro_batch=2", "policy.packing.pack_length=256"],
    "adapters, reference in memory": ["policy.lora.enabled=true", "reference.mode=live"],
    "recomputed": ["policy.activation_checkpointing=selective"],
    "over the batch": ["dpo.preference_loss=aot"],
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
def test_nothing_is_compiled_after_the_first_step(settings, tmp_path):
    seen = graphs_during_a_run(tmp_path, *settings)
    assert len(seen) > 4
    assert min(seen) == max(seen) > 0
