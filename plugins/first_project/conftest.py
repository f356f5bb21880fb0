"""Tests run where commands are given: there paths in a recipe, and modules that it names, are looked for."""

import os
from pathlib import Path

os.chdir(Path(__file__).parent)
