"""Verify the data directory of a bucket, or repair it.

Checks every checksum, the order of seqnos, keys, counts, failover logs and snapshots, and prints each
fault; with --json a directory without faults gives {"sound": true}. The node must be stopped. With --repair
all readable data is written to new files. The output names what was lost, and the bucket begins new
branches, so that consumers roll back.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.output import ExitCode, Output

if TYPE_CHECKING:
    from upper.storage.load import Damage

EXAMPLES = """
upper check data
upper check data --repair
upper check data --json
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="the directory that holds bucket.json")
    parser.add_argument("--repair", action="store_true", help="write all readable data to new files")


def run(args: Namespace, out: Output) -> ExitCode:
    from upper.storage.check import check, repair, weight

    if args.repair:
        with out.progress("repairing", weight(args.directory)) as bar:
            findings = list(repair(args.directory, bar.advance))
        _show(findings, out, sound="sound; nothing was changed")
        if findings:
            out.note(f"repaired; `upper check {args.directory}` should find nothing now")
        return ExitCode.OK
    with out.progress("checking", 2 * weight(args.directory)) as bar:
        findings = list(check(args.directory, bar.advance, placement=True))
    _show(findings, out, sound="sound")
    if findings:
        out.note("stop the process that writes there, keep a copy, then run with --repair; it moves no keys")
    return ExitCode.CORRUPT if findings else ExitCode.OK


def _show(findings: list[Damage], out: Output, *, sound: str) -> None:
    if findings:
        out.show(findings)
    else:
        out.show({"sound": True}, text=sound)
