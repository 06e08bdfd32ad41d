"""Writes the JSON Schema of a run file beside the presets, for editors.

`python3 -m tools.schema` does it; a test holds the file to the models of a run file.
"""

from __future__ import annotations

import json
import sys

from launcher.tools.json_schema import schema
from launcher.tools.tuning.draft import SCHEMA


def text() -> str:
    """The file as it is now."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(text(), encoding="utf-8")
    sys.exit(0)
