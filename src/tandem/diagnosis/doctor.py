"""`tandem doctor`: checks this machine, and says how to fix what is wrong."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from tandem.diagnosis.children import device_findings, probe_torch, train_one_step
from tandem.diagnosis.finding import Finding, hide_secrets
from tandem.diagnosis.network import network_findings
from tandem.diagnosis.places import place_findings
from tandem.diagnosis.versions import version_findings

Bar = Callable[[str, int], AbstractContextManager[Callable[..., None]]]
NUM_CHECKS = 5


def _no_bar(what: str, total: int) -> AbstractContextManager[Callable[..., None]]:
    return nullcontext(lambda advance=1, numbers=(): None)


def doctor(*, network: bool = True, self_test: bool = True, bar: Bar = _no_bar) -> list[Finding]:
    """Check versions, GPUs, folders, the network and one step of training. Works without a GPU and with a broken torch.

    `network`: send one HEAD request to the Hugging Face hub. `self_test`: train the embedded model for one step. `bar`: opens a
    progress bar.
    """
    hide_secrets()
    with bar("Checking", NUM_CHECKS) as advance:
        findings = version_findings()
        advance(1)
        probed, of_torch = probe_torch()
        findings += of_torch + device_findings(probed)
        advance(1)
        findings += place_findings(has_gpu=bool(probed and probed["devices"]))
        advance(1)
        findings += network_findings(enabled=network)
        advance(1)
        if self_test and probed is not None:
            findings.append(train_one_step())
        advance(1)
    return findings


def has_problems(findings: list[Finding]) -> bool:
    return any(one.status == "problem" for one in findings)
