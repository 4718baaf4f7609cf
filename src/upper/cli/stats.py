"""What a node says about itself: counters, or one group of them.

Groups: memory, streams, timings, vbucket-details [N], failovers [N].
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from upper.cli.output import ExitCode, Output
from upper.cli.reaching import add_url, reach

EXAMPLES = """
upper stats upr://127.0.0.1:11210/default
upper stats upr://127.0.0.1:11210/default streams --json
upper stats upr://127.0.0.1:11210/default vbucket-details 7
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("group", metavar="GROUP", nargs="*", help="which ones; the general ones without")


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper stats") as bucket:
        answers = bucket.stats(" ".join(args.group))
    for node, lines in answers.items():
        if len(answers) > 1:
            out.show({"node": str(node), **lines})
        else:
            out.show(lines)
    return ExitCode.OK
