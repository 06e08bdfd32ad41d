"""`launcher schema`, as a command."""

from __future__ import annotations

import argparse
import json

import pytest

from launcher.cli.files import schema as command
from launcher.plan.schema import schema


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.declare(parser)
    assert command(parser.parse_args([])) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    assert "yaml-language-server: $schema=" in (parser.epilog or "")
