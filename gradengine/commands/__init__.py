"""The `gradengine` command, with its subcommands in `cli` and one file for each that is not in a different package.

The input is the words of a command line. The output is text and an exit status. The packages `bench`, `demo` and `plan`
contain the commands of the same names.
"""
