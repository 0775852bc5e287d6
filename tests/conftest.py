"""One cache for the whole test session, apart from the user's, and no network."""

import os
import tempfile

os.environ["TANDEM_CACHE"] = tempfile.mkdtemp(prefix="tandem-tests-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
