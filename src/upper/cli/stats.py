"""Print the statistics of a node, or of each node of a cluster: the general ones, or one group.

Groups: memory, disk, streams [CONNECTION], consumers, timings, vbucket-details [N], failovers [N],
replication [N], cluster. docs/reference/statistics.md explains each of them.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from upper.cli.common import add_url, reach
from upper.cli.output import ExitCode, Output
from upper.errors import InvalidArguments, KeyNotFound

EXAMPLES = """
upper stats upr://127.0.0.1:11210/default
upper stats upr://127.0.0.1:11210/default streams --json
upper stats upr://127.0.0.1:11210/default vbucket-details 7
"""

# Text also where it consists of digits: ids of 64 bits, and what users choose.
TEXT = {
    "id", "branch", "bucket_uuid", "version", "bucket", "name", "user", "peer", "filter",
    "node_id", "zone", "controller",
}  # fmt: skip
NUMBER = re.compile(r"-?\d{1,15}(\.\d+)?")


def add_arguments(parser: ArgumentParser) -> None:
    add_url(parser)
    parser.add_argument("group", metavar="GROUP", nargs="*", help="a group of statistics (the general ones)")


def run(args: Namespace, out: Output) -> ExitCode:
    with reach(args, "upper stats") as bucket:
        try:
            answers = bucket.stats(" ".join(args.group))
        except KeyNotFound as error:  # the protocol's answer for an unknown group
            raise InvalidArguments(str(error)) from None
        nodes = bucket.routes.nodes
    for node, lines in answers.items():
        content = numbers(lines) if out.as_json else lines
        out.show({"node": str(node), **content} if len(nodes) > 1 else content)
    if not args.group:  # a group may concern one partition, and only its node answers
        for node in nodes:
            if node not in answers:
                out.note(f"upper: {node} does not answer; its statistics are missing")
    return ExitCode.OK


def numbers(lines: Mapping[str, str]) -> dict[str, str | int | float]:
    """The statistics with numbers as numbers; the protocol sends all of them as text."""
    return {name: _value(name, text) for name, text in lines.items()}


def _value(name: str, text: str) -> str | int | float:
    if name.rpartition(":")[2] in TEXT or not NUMBER.fullmatch(text):
        return text
    return float(text) if "." in text else int(text)
