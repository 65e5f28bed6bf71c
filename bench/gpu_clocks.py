"""A GPU's clocks, power and temperature beside a stage, by nvidia-smi: a hot or throttled GPU has other figures."""

import statistics
import subprocess
from collections.abc import Mapping, Sequence

EVERY = 3.0  # seconds between two looks: each takes a core for some milliseconds
LIMIT = 5.0  # seconds for nvidia-smi
FIELDS = {
    "sm_mhz": "clocks.sm",
    "sm_mhz_at_most": "clocks.max.sm",
    "memory_mhz": "clocks.mem",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
}


def look() -> dict[str, float]:
    """What the first GPU says now; without what it does not say, and nothing where there is no nvidia-smi."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    said = zip(FIELDS, done.stdout.strip().split(","), strict=False)
    return {name: number for name, number in ((name, _number(word)) for name, word in said) if number is not None}


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
