"""The memory that `tandem plan` expects, compared with the peak of a real run on a GPU."""

import gc

import pytest
import torch
from shapes import model_folder
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.load import load_config
from tandem.planning.plan import plan
from tandem.report.reporter import Reporter
from tandem.training.trainer import train

pytestmark = pytest.mark.gpu
GIB = 2**30
# The estimate was 19 GiB where 17.6 were measured for this shape, so it may be off by more than for larger models.
BAND = 0.2


@pytest.mark.parametrize(
    "settings",
    [[], ["policy.activation_checkpointing=full"], ["policy.lora.enabled=true"], ["policy.optimizer.offload=true"]],
    ids=["all", "full", "lora", "offload"],
)
def test_the_expected_memory_is_near_the_peak_of_a_run(settings, tmp_path):
    folder = model_folder("qwen2.5-0.5b", tmp_path / "model")
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    overrides = [
        f"policy.model_name={folder}",
        "data.train.data_path=embedded",
        "policy.train_global_batch_size=128",
        "policy.packing.pack_length=8192",
        "dpo.max_num_steps=2",
        "dpo.val_period=0",
        "dpo.val_at_start=false",
        "dpo.val_at_end=false",
        "checkpointing.enabled=false",
        "cluster.gpus_per_node=1",
        f"run.dir={tmp_path}/run",
        *settings,
    ]
    loaded = load_config(None, overrides)
    expected = plan(loaded)
    assert expected.rows.length == 8192
    gc.collect()  # what the tests before have left
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(loaded, Reporter("quiet"))
    assert expected.memory.total / GIB == pytest.approx((torch.cuda.max_memory_allocated() - held) / GIB, rel=BAND)
