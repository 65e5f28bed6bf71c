"""Fuzzing of all that strangers and peers can send: `make fuzz`; CI replays the corpus, and some changes of it.

`targets` are functions of bytes, each for one door; `corpus` makes what they begin with; `__main__` gives them to
atheris, which looks for bytes that reach new code.
"""
