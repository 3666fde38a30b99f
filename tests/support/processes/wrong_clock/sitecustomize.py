"""Imported by Python at its start where :func:`support.processes.clocks.environment` says so."""

import os

from support.processes import clocks

clocks.shift(float(os.environ[clocks.VARIABLE]))
