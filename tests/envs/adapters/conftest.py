"""Lets the tests of adapters share how they play and what hostile texts there are."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [path for path in (str(HERE), str(HERE.parent)) if path not in sys.path]
