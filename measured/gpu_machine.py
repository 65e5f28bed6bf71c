"""Print the GPU's machine and versions as JSON, and write them to a file: the stage `machine` of gpu_check.py."""

import importlib
import json
import sys
from pathlib import Path

from gradengine.bench.machine import machine, versions

xp = importlib.import_module("cupy")
text = json.dumps({"machine": machine(xp), "versions": versions(xp)}, indent=1)
print(text)
Path(sys.argv[1]).write_text(f"{text}\n")
