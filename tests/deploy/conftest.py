"""Tests of what deploy/ holds. They use the daemon class of the API tests, and skip with a reason where a tool is missing.

KVASIR_FULL=yes adds what builds images and installs packages.
"""
import os
import sys

import pytest

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__)), os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "api")]
from daemon import BIN, MODEL  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "full: builds images or installs packages; only with KVASIR_FULL=yes")
    config.addinivalue_line("markers", "needs_model: runs a daemon")


def pytest_collection_modifyitems(items):
    no_model = None
    if not MODEL or not os.path.exists(MODEL):
        no_model = f"KVASIR_TEST_MODEL: {MODEL or 'no model'} is not there"
    elif not os.path.exists(BIN):
        no_model = f"{BIN} is not built"
    for item in items:
        if item.get_closest_marker("full") and os.environ.get("KVASIR_FULL") != "yes":
            item.add_marker(pytest.mark.skip(reason="only with --full"))
        if item.get_closest_marker("needs_model") and no_model:
            item.add_marker(pytest.mark.skip(reason=no_model))


def pytest_terminal_summary(terminalreporter):
    """The line that tests/run.sh adds up; an error in a fixture is a failure."""
    n = {k: len(terminalreporter.stats.get(k, [])) for k in ("passed", "failed", "error", "skipped")}
    terminalreporter.write_line(f"{n['passed']} passed, {n['failed'] + n['error']} failed, {n['skipped']} skipped")
