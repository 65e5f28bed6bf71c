"""A yardstick of the tests: `make mutants` plants faults, one at a time, and runs the test files that should see each.

faults.toml      the faults: a text of a file, what it becomes, and the test files
lived.txt        those that no test sees
"""
