"""What each kernel takes of a GPU, by architecture, as Markdown: `python measured/kernel_table.py` (no GPU is needed).

It needs NVRTC: `make compile-check` brings it, and prints the table too.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import nvrtc


def cell(kernel: nvrtc.Kernel) -> str:
    """Registers and KB of code; bytes that spilled and of a stack frame, where there are any."""
    spilled = kernel.spill_stores + kernel.spill_loads
    troubles = [f"**{count} B {what}**" for count, what in ((spilled, "spilled"), (kernel.stack, "of stack")) if count]
    return ", ".join([str(kernel.registers), f"{kernel.code / 1024:.0f} KB", *troubles])


def rows(major: int, name: str) -> list[str]:
    """A row for each kernel of a .cu file."""
    compiled = [nvrtc.compiled(major, name, architecture).kernels for architecture in nvrtc.ARCHITECTURES[major]]
    found = []
    for kernel in nvrtc.kernels_of(name):
        variants = [kernels[kernel] for kernels in compiled]
        shared, arguments = max(variant.shared for variant in variants), variants[0].arguments
        found.append(f"| {kernel} | {arguments} | {shared} | {' | '.join(map(cell, variants))} |")
    return found


def table(major: int) -> str:
    """All kernels, compiled by one CUDA version."""
    columns = ["kernel", "bytes of arguments", "bytes of shared memory", *nvrtc.ARCHITECTURES[major]]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name in nvrtc.names():
        lines += rows(major, name)
    return "\n".join([f"Registers of a thread and KB of code, by NVRTC of CUDA {major}:", "", *lines, ""])


if __name__ == "__main__":
    majors = [major for major in nvrtc.MAJORS if nvrtc.library(major)]
    if not majors:
        sys.exit("NVRTC is not installed; run `make kernel-table`")
    for major in majors:
        print(table(major))
