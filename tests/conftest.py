"""Settings of the test session: a separate cache, one thread per process, no network."""

import os
import shutil
import signal
import tempfile

CACHE = os.environ["TANDEM_CACHE"] = tempfile.mkdtemp(prefix="tandem-tests-")
# Compiled layers are kept between sessions, because compiling takes minutes. Torch never loads an entry that does not fit.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/tandem-tests-compiled-{os.getuid()}")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# More threads would slow tiny models down, and runs are compared bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def bfloat16_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests marked bfloat16: emulate bfloat16 products on a CPU without them."""
    if not request.node.get_closest_marker("bfloat16"):
        yield
        return
    from bfloat16_products import with_bfloat16_products

    with with_bfloat16_products():
        yield


@pytest.fixture
def of_a_command() -> Iterator[None]:
    """Messages name options, as while a command runs. Without this, they name arguments of Python."""
    from tandem.terminal.arguments import command_words

    with command_words():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", metavar="NUMBER/COUNT", help="every COUNT-th test from the NUMBER-th on: 1/3, 2/3 and 3/3"
    )


@pytest.hookimpl(trylast=True)  # after -m and -k have selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if shard := config.getoption("shard"):
        from shards import shard_of

        items[:], others = shard_of(items, shard)
        config.hook.pytest_deselected(items=others)


def pytest_configure() -> None:
    """Processes that tests start and stop with Ctrl-C must not inherit that it is ignored, as in a shell's background jobs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)
