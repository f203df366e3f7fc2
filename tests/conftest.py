"""Makes tests/helpers importable: ``from dtype_recorder import record_dtypes``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
