"""Imported by Python at its start where :func:`support.clocks.environment` says so."""

import os

from support import clocks

clocks.shift(float(os.environ[clocks.VARIABLE]))
