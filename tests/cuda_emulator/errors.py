"""What can go wrong: what the emulator finds in a kernel, and what g++ says of it."""


class EmulatorError(RuntimeError):
    """A kernel did what no GPU promises to bear: a race, an access out of bounds, a wrong argument..."""


class CompileException(Exception):
    """The compiler refused a kernel's source; the message is its own."""
