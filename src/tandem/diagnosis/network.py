"""Checks whether the Hugging Face hub can be reached. Sends one HEAD request without credentials, and nothing else."""

import os
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from tandem.diagnosis.finding import Finding, finding

HUB = "https://huggingface.co"
SECONDS = 5.0
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TRUE = ("1", "on", "yes", "true")
OFFLINE = "local models and data files work; models and datasets of the hub work only if they are in its cache"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects: older versions of Python would follow a HEAD request with a GET request."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def network_findings(*, enabled: bool) -> list[Finding]:
    """`enabled`: if False, nothing is sent."""
    return [_hub(enabled=enabled), _token()]


def _hub(*, enabled: bool) -> Finding:
    offline = next((name for name in OFFLINE_VARIABLES if os.environ.get(name, "").lower() in TRUE), None)
    if offline is not None:
        return finding("network", "note", f"not checked: {offline} is set, so {OFFLINE}")
    if not enabled:
        return finding("network", "note", "not checked (--no-network)")
    endpoint = os.environ.get("HF_ENDPOINT") or HUB
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return finding("network", "warning", f"HF_ENDPOINT = {endpoint} is not a web address", fix="Unset HF_ENDPOINT.")
    port = f":{parts.port}" if parts.port else ""
    address = f"{parts.scheme}://{parts.hostname}{port}/"  # without user, password and path
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        opener.open(urllib.request.Request(address, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError as error:  # it answered
        error.close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return finding("network", "note", f"{address} cannot be reached ({reason}); {OFFLINE}")
    return finding("network", "ok", f"{address} can be reached")


def _token() -> Finding:
    is_set = any(os.environ.get(name) for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    return finding("hub token", "ok", "HF_TOKEN is set" if is_set else "HF_TOKEN is not set; public models need none")
