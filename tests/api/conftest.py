import os
import sys

import httpx
import openai
import pytest

sys.path.insert(0, os.path.dirname(__file__))
from daemon import BIN, MODEL, SLOW, Daemon  # noqa: E402
from transport import Echo  # noqa: E402


def pytest_collection_modifyitems(items):
    reason = None
    if not MODEL:
        reason = "KVASIR_TEST_MODEL names no model"
    elif not os.path.exists(MODEL):
        reason = f"KVASIR_TEST_MODEL: {MODEL} is not there"
    elif not os.path.exists(BIN):
        reason = f"{BIN} is not built"
    if reason:
        for item in items:
            if not item.get_closest_marker("no_model"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config):
    config.addinivalue_line("markers", "alone: compares times, so nothing else may run beside it")
    config.addinivalue_line("markers", "no_model: the test needs no model")
    config.addinivalue_line("markers", "trained: the test counts on a real model, its words or its sizes; one with random weights has others")
    config.addinivalue_line("markers", "quirk(numbers): the cases of client-quirks.md that the test is about")


@pytest.fixture(scope="session")
def daemon():
    """The daemon that most tests share; whatever they do to it, it ends well."""
    with Daemon() as d:
        yield d
        d.wait_idle()


@pytest.fixture(scope="module")
def echo():
    """The transport with an echo in place of the application."""
    with Echo() as e:
        yield e


@pytest.fixture
def client(daemon):
    with openai.OpenAI(base_url=daemon.url + "/v1", api_key="none", max_retries=0, timeout=120 * SLOW) as c:
        yield c


@pytest.fixture
def http(daemon):
    with httpx.Client(base_url=daemon.url, timeout=120 * SLOW) as c:
        yield c


def pytest_terminal_summary(terminalreporter):
    """The line that tests/run.sh adds up; an error in a fixture is a failure."""
    n = {k: len(terminalreporter.stats.get(k, [])) for k in ("passed", "failed", "error", "skipped")}
    terminalreporter.write_line(f"{n['passed']} passed, {n['failed'] + n['error']} failed, {n['skipped']} skipped")
