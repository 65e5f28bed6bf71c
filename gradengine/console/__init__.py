"""Options, output and a pool of worker processes, shared by the commands.

The input is the words of a command line, and jobs. The output is checked options, text or JSON, and the workers'
reports. `commands`, `bench`, `demo` and `plan` use this package, which imports only `errors`.
"""
