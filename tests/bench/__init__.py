"""What ``make bench`` measures: one module per part, each runnable alone (see docs/benchmarks.md)."""

import sys
from pathlib import Path

# So that ``support`` is found, as pytest finds it.
sys.path.insert(0, str(Path(__file__).parents[1]))
