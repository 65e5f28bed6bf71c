"""`make fuzz`: inputs by the hundred thousand for each target, changed so that they reach new code; needs atheris."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fuzz.corpus import corpus, keep
from fuzz.targets import TARGETS

COUNTS = {
    "message": 300_000,
    "hello": 200_000,
    "table": 100_000,
    "addresses": 100_000,
    "stranger": 100_000,
    "listener": 50_000,
    "link": 50_000,
    "shared_memory": 50_000,
}
LIMITS = ["-max_len=4096", "-timeout=20", "-rss_limit_mb=1024", "-verbosity=0"]  # seconds are of one input
_MOST_KEPT, _MOST_BYTES = 40, 256  # inputs of a target, and bytes of each

# Only atheris' process, which ends without coming back, instruments the package.
_INSIDE = """
import sys, atheris
with atheris.instrument_imports(include=["gradengine.exchange", "gradengine.layout"]):
    from fuzz.targets import TARGETS
atheris.Setup(sys.argv, TARGETS[sys.argv.pop(1)])
atheris.Fuzz()
"""


def fuzz(target, count, seed, *, keeps):
    """Give a target so many inputs; returns whether it ended well with each, and prints one with which it did not."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name) / "corpus", Path(name) / "found"
        folder.mkdir()
        for number, data in enumerate(corpus(target)):
            (folder / str(number)).write_bytes(data)
        began = time.monotonic()
        options = [*LIMITS, f"-runs={count}", f"-seed={seed}", f"-artifact_prefix={found}-"]
        command = [sys.executable, "-c", _INSIDE, target, *options, str(folder)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        reached = sorted((path.read_bytes() for path in folder.iterdir()), key=len)
        seconds = time.monotonic() - began
        print(f"{target}: {count} inputs in {seconds:.0f} s, {len(reached)} reached something new", flush=True)
        if keeps:
            keep(target, [data for data in reached if len(data) <= _MOST_BYTES][:_MOST_KEPT])
        if done.returncode:
            print(done.stdout[-6000:])
        for path in Path(name).glob("found-*"):
            print(f'to see it again: make fuzz ARGS="--target {target} --bytes {path.read_bytes().hex()}"')
        return done.returncode == 0


def main():
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--target", choices=COUNTS, help="this one alone")
    parser.add_argument("--inputs", type=int, help="how many, for each target")
    parser.add_argument("--seed", type=int, default=1, help="of the changes")
    parser.add_argument("--keep", action="store_true", help="keep inputs that reached something new: tests/fuzz/corpus")
    parser.add_argument("--bytes", type=bytes.fromhex, help="give the target this input, as hex, and nothing else")
    given = parser.parse_args()
    if given.bytes is not None:
        TARGETS[given.target](given.bytes)
        return 0
    targets = [given.target] if given.target else COUNTS
    ended = [fuzz(target, given.inputs or COUNTS[target], given.seed, keeps=given.keep) for target in targets]
    print("nothing was found" if all(ended) else f"{ended.count(False)} targets have failed")
    return int(not all(ended))


if __name__ == "__main__":
    sys.exit(main())
