"""What commands share: their options and output, and a pool of worker processes.

In: words of a command line, and jobs. Out: checked options, text or JSON, and what each worker reports. It serves
`commands`, `bench`, `demo` and `plan`, and imports only `errors`.
"""
