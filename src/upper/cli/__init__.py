"""The verbs of the `upper` command: one module each. It parses arguments, calls, and shows the result.

`main` holds the table of verbs, `output` prints results, `common` has the arguments that verbs share.
"""
