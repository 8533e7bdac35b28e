"""Makes `bench_helpers` importable."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)
sys.path[:0] = [HERE] if HERE not in sys.path else []
