"""Makes tests/helpers importable (``from dtype_recorder import record_dtypes``) and keeps OpenMP to one thread.

Several threads in kernels this small wait for each other longer than they work, tenfold where a core is busy.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in subprocesses
sys.path.insert(0, str(Path(__file__).parent / "helpers"))
