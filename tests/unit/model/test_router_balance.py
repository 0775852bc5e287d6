"""The load-balancing loss is refused for models that cannot have it, before weights load."""

import pytest
import torch
import transformers
from hybrids import WITHOUT_LOGITS
from models import tiny_config
from transformers import GraniteMoeForCausalLM

from tandem.config.load import load_config
from tandem.errors import ConfigError
from tandem.model.architecture import TYPES_WITH_BALANCE, architecture_of, router_class
from tandem.model.distributed.mesh import SINGLE_RANK_MESH, MeshShape
from tandem.model.files.source import ModelSource
from tandem.model.files.tiny import tiny_model
from tandem.training.start.machine import check_machine

CPU = torch.device("cpu")


def check(model_type, *overrides, mesh=SINGLE_RANK_MESH, **changes):
    config = load_config(None, ["dpo.router_aux_loss_coef=0.01", *overrides]).config
    source = ModelSource("theirs", tiny_model(), tiny_config(model_type, **changes))
    return check_machine(config, source, CPU, mesh)


def refusal(*given, **named):
    with pytest.raises(ConfigError) as refused:
        check(*given, **named)
    return str(refused.value)


def test_a_model_without_experts_is_refused():
    assert refusal("llama") == "dpo.router_aux_loss_coef = 0.01: theirs has no experts. Leave it out."


def test_routers_that_balance_in_another_way_are_refused():
    assert refusal("deepseek_v3") == (
        "dpo.router_aux_loss_coef = 0.01: routers of deepseek_v3 models have no load-balancing loss in tandem, because they "
        "balance in another way or do not report their logits. Leave it out. It works with flex_olmo, gpt_oss, granitemoe, "
        "granitemoe_swa, granitemoeshared, mellum, mixtral, olmoe, phimoe, qwen2_moe, qwen3_moe, qwen3_next, qwen3_5_moe_text."
    )


def test_rows_that_are_divided_among_ranks_are_refused():
    assert refusal("qwen3_moe", mesh=MeshShape(1, 1, 2)) == (
        "dpo.router_aux_loss_coef = 0.01: does not work with policy.parallel.context = 2, which divides the tokens of a row "
        "among ranks. Use policy.parallel.context=1."
    )


def test_every_listed_type_reports_the_logits_of_its_routers():
    for model_type in set(TYPES_WITH_BALANCE).difference(WITHOUT_LOGITS):
        assert router_class(architecture_of(tiny_config(model_type))) is not None
        check(model_type)
    assert router_class(architecture_of(tiny_config("deepseek_v3"))) is None


def test_a_model_whose_routers_do_not_report_their_logits_is_refused(monkeypatch):
    monkeypatch.setattr(GraniteMoeForCausalLM, "_can_record_outputs", {})
    assert refusal("granitemoe") == (
        "dpo.router_aux_loss_coef = 0.01: routers of granitemoe models do not report their logits in transformers "
        f"{transformers.__version__}. Upgrade it, or leave the key out."
    )


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"dpo.router_aux_loss_coef = -1\.?0?: "):
        load_config(None, ["dpo.router_aux_loss_coef=-1"])
