"""`evaluate` on a GPU: packed bfloat16 and float32 numbers agree with a plain forward pass."""

import pytest
import torch
from models import MODEL
from transformers import AutoModelForCausalLM

from tandem.evaluation.evaluate import evaluate
from tandem.evaluation.measure import measure_model
from tandem.evaluation.request import check_request
from tandem.report.reporter import Reporter

pytestmark = pytest.mark.gpu


def test_log_probabilities_are_those_of_a_plain_forward_pass():
    request = check_request(str(MODEL), ["embedded"], overrides=["policy.precision=float32"])
    measured = measure_model(request.subject, request.data, None, Reporter("quiet"))
    (only,) = measured.sets
    model = AutoModelForCausalLM.from_pretrained(MODEL, attn_implementation="eager").to("cuda")
    for pair in range(8):
        one = only.set.store[int(only.table.preference[pair])]
        completion = one.completions[int(only.table.winner[pair])]
        ids = torch.tensor([[*one.prompt, *completion]], device="cuda")
        with torch.no_grad():
            logps = model(ids).logits[0, len(one.prompt) - 1 : -1].log_softmax(-1)
        plain = logps.gather(-1, ids[0, len(one.prompt) :, None]).sum()
        assert only.table["logp_chosen"][pair] == pytest.approx(float(plain), abs=1e-2)


def test_a_model_equals_its_reference_in_bfloat16():
    found = evaluate(str(MODEL), ["embedded"], reference=str(MODEL))
    assert (found.precision, found.total.num_pairs, found.total.accuracy.value) == ("bfloat16", 70, 0.5)
