"""Verify the data directory of a bucket, or repair it.

Looks at every checksum, the order of seqnos, keys, counts, failover logs and snapshots, and prints what
is not as it should be. The node must be stopped. With --repair everything that can still be read is
written anew; what was lost is said, and the bucket begins new branches, so that consumers learn of it.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from upper.cli.output import ExitCode, Output

EXAMPLES = """
upper check data
upper check data --repair
upper check data --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory that holds bucket.json")
    parser.add_argument("--repair", action="store_true", help="keep what can be read, write it anew")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.storage.check import check, repair, weight

    if args.repair:
        with out.progress("repairing", weight(args.directory)) as bar:
            findings = list(repair(args.directory, bar.advance))
        out.show(findings, empty="sound; nothing was changed")
        if findings:
            out.note(f"repaired; `upper check {args.directory}` should find nothing now")
        return ExitCode.OK
    with out.progress("checking", 2 * weight(args.directory)) as bar:
        findings = list(check(args.directory, bar.advance))
    out.show(findings, empty="sound")
    if findings:
        out.note("stop whatever writes there, keep a copy, then run with --repair")
    return ExitCode.CORRUPT if findings else ExitCode.OK
