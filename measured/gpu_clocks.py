"""A GPU's clocks, power and temperature beside a stage, by nvidia-smi: a hot or throttled GPU has other figures."""

import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

EVERY = 500  # milliseconds
FIELDS = {
    "sm_mhz": "clocks.sm",
    "sm_mhz_at_most": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
}
COMMAND = ("nvidia-smi", "--id=0", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits")


class Clocks:
    """One nvidia-smi for a whole run; nothing is known where there is none.

    A driver that keeps no state without a client would start the GPU anew for each look, and for each stage.

    Args:
        folder: Where it writes all that it says.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clocks.csv"
        self.process: subprocess.Popen[bytes] | None = None
        with self._path.open("w") as said:
            try:
                self.process = subprocess.Popen(  # noqa: S603  (the command stands above)
                    [*COMMAND, "-lms", str(EVERY)], stdout=said, stderr=subprocess.DEVNULL
                )
            except OSError:
                return

    def close(self) -> None:
        """End it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def mark(self) -> int:
        """A moment."""
        return self._path.stat().st_size

    def since(self, mark: int) -> dict[str, dict[str, float]]:
        """What was seen after that moment."""
        text = self._path.read_bytes()[mark:].decode(errors="replace")
        return summary([look(line) for line in text.splitlines()])


def look(line: str) -> dict[str, float]:
    """What one line says, without what it does not say.

    >>> look("345, 1980, [N/A], 70.5, 31")
    {'sm_mhz': 345.0, 'sm_mhz_at_most': 1980.0, 'watts': 70.5, 'celsius': 31.0}
    """
    said = zip(FIELDS, map(_number, line.split(",")), strict=False)
    return {name: number for name, number in said if number is not None}


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # "[N/A]"
        return None


def summary(looks: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The least, the median and the most of each, over a stage.

    >>> summary([{"watts": 100.0}, {}, {"watts": 700.0}, {"watts": 600.0}])
    {'watts': {'least': 100.0, 'median': 600.0, 'most': 700.0}}
    """
    series = {name: [each[name] for each in looks if name in each] for name in FIELDS}
    return {
        name: {"least": min(numbers), "median": statistics.median(numbers), "most": max(numbers)}
        for name, numbers in series.items()
        if numbers
    }


def shown(found: Mapping[str, Mapping[str, float]]) -> str:
    """In a few words: the median, and how far the clock fell.

    >>> shown(summary([{"sm_mhz": 1980.0, "watts": 640.0, "celsius": 61.0}]))
    'SM 1980 MHz (least 1980), 640 W, 61 C'
    >>> shown({})
    ''
    """
    words = {
        "sm_mhz": "SM {median:.0f} MHz (least {least:.0f})",
        "watts": "{median:.0f} W",
        "celsius": "{median:.0f} C",
    }
    return ", ".join(text.format(**found[name]) for name, text in words.items() if name in found)
