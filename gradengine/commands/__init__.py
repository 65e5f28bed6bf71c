"""The `gradengine` command: `cli` names its subcommands, and each other file here is one of them.

In: words of a command line. Out: what it prints, and its status. `bench`, `demo` and `plan` hold their own commands.
"""
