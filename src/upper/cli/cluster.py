"""Create and operate a cluster: several nodes that hold the copies of one bucket.

Nodes join with `upper serve --join STORE`. STORE is an agreement store: etcd for several machines, or a
directory for several nodes on one machine. `upper cluster up` does all of this on one machine.
"""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from upper.cli.common import add_credentials, agreed, number
from upper.cli.durations import some_seconds
from upper.cli.output import ExitCode, Output
from upper.cli.store_options import STORE_HELP, add_store_options, store_opener

if TYPE_CHECKING:
    from upper.cluster.administration import FailoverByHand
    from upper.cluster.agreement import AgreementStore
    from upper.cluster.members import ClusterState, Rebalance

EXAMPLES = """
upper cluster up --nodes 3 --data ./c
upper cluster create etcd://10.0.0.1,10.0.0.2,10.0.0.3/orders --replicas 1
upper cluster status ./c/agreement
upper cluster status upr://127.0.0.1:11210/default --json
upper cluster rebalance ./c/agreement --dry-run
upper cluster failover ./c/agreement n2
upper cluster rebalance ./c/agreement --remove n2
upper cluster set ./c/agreement replicas=1 acknowledge=local
"""
POLL = 0.5  # seconds between two looks at a rebalance
SHOWN = 20  # partitions whose losses are listed


def add_arguments(parser: ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="do", metavar="VERB", required=True)

    def add(name: str, about: str, *, store: str | None = "STORE") -> ArgumentParser:
        made = verbs.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        made.add_argument("--json", action="store_true", default=SUPPRESS, help=SUPPRESS)
        if store is not None:
            what = f"{STORE_HELP}, or the URL of a node" if "URL" in store else STORE_HELP
            made.add_argument("store", metavar=store, help=what)
            add_store_options(made)
        return made

    up = add("up", "start a cluster on this machine, and stop it with Ctrl-C", store=None)
    up.add_argument("--nodes", type=number(1, 64), default=3, metavar="N", help="nodes (%(default)s)")
    up.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory of the nodes and of the agreement store; created if missing",
    )
    up.add_argument(
        "--port",
        type=ports,
        default="11210",
        metavar="PORT[,PORT...]",
        help="ports of the nodes, counted up after the last one given; 0 for free ones (%(default)s)",
    )
    up.add_argument("--replicas", type=number(0, 3), metavar="N", help="of a new bucket (1 if nodes allow)")
    up.add_argument(
        "--partitions",
        type=int,
        default=1024,
        metavar="N",
        help="of a new bucket, a power of two (%(default)s)",
    )
    up.add_argument("--memory", metavar="SIZE", help="memory for items of each node, such as 512M")
    up.add_argument(
        "--lease",
        type=some_seconds,
        default=3.0,
        metavar="TIME",
        help="how long a silent node counts as alive (3s)",
    )

    create = add("create", "place the bucket on the nodes that have joined")
    create.add_argument("--bucket", default="default", metavar="NAME", help="its name (%(default)s)")
    create.add_argument(
        "--partitions", type=int, default=1024, metavar="N", help="a power of two (%(default)s)"
    )
    create.add_argument(
        "--replicas",
        type=number(0, 3),
        default=1,
        metavar="N",
        help="further copies of each partition (%(default)s)",
    )
    create.add_argument(
        "--acknowledge",
        choices=("in-sync", "local"),
        default="in-sync",
        help="answer a write once every in-sync copy has it, or the active one (%(default)s)",
    )
    create.add_argument(
        "--minimum-copies",
        type=number(1, 4),
        default=1,
        metavar="N",
        help="refuse writes while fewer copies are in sync (%(default)s)",
    )

    status = add("status", "show nodes, copies, lag and moves", store="STORE|URL")
    status.add_argument("--watch", action="store_true", help="show it again every second, until Ctrl-C")
    _add_access(status)

    rebalance = add("rebalance", "spread the copies evenly over the nodes, or empty a node")
    rebalance.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="NAME",
        help="move everything off this node, and remove it; may be repeated",
    )
    rebalance.add_argument("--dry-run", action="store_true", help="print the moves, and change nothing")
    rebalance.add_argument("--cancel", action="store_true", help="end a running rebalance where it is")
    rebalance.add_argument(
        "--at-once",
        type=number(1, 1024),
        default=128,
        metavar="N",
        help="partitions that one node copies at a time (%(default)s)",
    )
    rebalance.add_argument(
        "--rate",
        type=_rate,
        metavar="SIZE",
        help="bytes per second that one node sends to new copies, like 50M (no limit)",
    )
    rebalance.add_argument("--no-wait", action="store_true", help="return once it has started")

    failover = add("failover", "let other copies take over the partitions of a node that is away")
    failover.add_argument("name", metavar="NAME", help="the node")
    failover.add_argument(
        "--force",
        action="store_true",
        help="also promote copies that are out of date, and also if the node is alive",
    )
    failover.add_argument("--yes", action="store_true", help="do not ask, even if changes are lost")
    _add_access(failover)

    settings = add("set", "change settings of the bucket")
    settings.add_argument(
        "values",
        metavar="NAME=VALUE",
        nargs="+",
        help="replicas=N, acknowledge=in-sync|local, minimum-copies=N",
    )


def _add_access(parser: ArgumentParser) -> None:
    """How the command connects to the nodes, to ask how far their copies are."""
    add_credentials(parser)
    parser.add_argument(
        "--cluster-ca", type=Path, metavar="FILE", help="certificates that sign those of the nodes, PEM"
    )


def ports(text: str) -> list[int]:
    """Parse `11210` or `11210,12000`."""
    return [number(0, 65535)(part) for part in text.split(",")]


def run(args: Namespace, out: Output) -> ExitCode:
    if args.do == "up":
        from upper.cli.cluster_up import up

        return up(args, out)
    if args.do == "status":
        from upper.cli.cluster_status import status

        return status(args, out)
    with closing(store_opener(args, args.store)()) as store:
        return DO[args.do](args, out, store)


def _create(args: Namespace, out: Output, store: AgreementStore) -> ExitCode:
    from upper.cluster.administration import create
    from upper.cluster.bucket_map import BucketSettings
    from upper.cluster.moves import held
    from upper.errors import InvalidArguments

    try:
        settings = BucketSettings(
            args.bucket, args.partitions, args.replicas, args.acknowledge, args.minimum_copies
        )
    except ValueError as error:
        raise InvalidArguments(f"{error}") from None
    made = create(store, settings)
    nodes = len(held(made))
    out.show(
        {
            "bucket": settings.name,
            "partitions": settings.partitions,
            "replicas": settings.replicas,
            "nodes": nodes,
        },
        text=f"{settings.name}: {settings.partitions} partitions on {nodes} nodes, "
        f"replicas={settings.replicas}",
    )
    return ExitCode.OK


def _rate(text: str) -> int:
    """`50M` in bytes per second."""
    from argparse import ArgumentTypeError

    from upper.cli.serve import size
    from upper.errors import UpperError

    try:
        rate = size(text)
    except UpperError as error:
        raise ArgumentTypeError(str(error)) from None
    if rate < 1:
        raise ArgumentTypeError(f"{text} is not a rate; use 1 byte per second or more")
    return rate


def _rebalance(args: Namespace, out: Output, store: AgreementStore) -> ExitCode:
    from upper.cluster.administration import cancel_rebalance, planned, start_rebalance
    from upper.cluster.members import read_state

    if args.cancel:
        found = cancel_rebalance(store)
        out.print_line("the rebalance was cancelled" if found else "no rebalance is running")
        return ExitCode.OK
    state = read_state(store)
    if state.rebalance is not None and not args.remove and not args.dry_run:
        out.note("a rebalance is running already")  # it is shown below
    else:
        plan = planned(state, remove=args.remove, at_once=args.at_once, rate=args.rate)
        if args.dry_run:
            _show_plan(plan, state, out)
            return ExitCode.OK
        start_rebalance(store, plan, state)
        out.note(f"{plan.total} partitions move")
    if not args.no_wait:
        wait_for_rebalance(store, out)
    return ExitCode.OK


def _show_plan(plan: Rebalance, state: ClusterState, out: Output) -> None:
    assert state.bucket_map is not None
    rows = [
        {
            "partition": int(move.partition),
            "add": [state.name_of(node) for node in move.add],
            "remove": [state.name_of(node) for node in move.remove],
            "active": state.name_of(move.active),
        }
        for move in plan.remaining(state.bucket_map)
    ]
    out.show(rows, empty="nothing moves: the copies are spread evenly")


def wait_for_rebalance(
    store: AgreementStore, out: Output, given_up: Callable[[], bool] = lambda: False
) -> None:
    """Show the progress of a rebalance until it has ended, or is not waited for any more."""
    from upper.cluster.members import read_state

    state = read_state(store)
    total = state.rebalance.total if state.rebalance is not None else 0
    with out.progress("moving partitions", total) as progress:
        while state.rebalance is not None and state.bucket_map is not None:
            left = len(state.rebalance.remaining(state.bucket_map))
            progress.reached(max(0, total - left))
            if given_up():
                return
            store.wait("", after=state.revision, seconds=POLL)
            state = read_state(store, state)
    out.print_line("the copies are spread as planned")


def _failover(args: Namespace, out: Output, store: AgreementStore) -> ExitCode:
    from upper.cli.cluster_status import reports_of
    from upper.cluster.administration import bucket_of, fail_over_by_hand, planned_failover
    from upper.cluster.members import read_state
    from upper.errors import InvalidArguments

    state = read_state(store)
    bucket_of(state)
    reports = reports_of(args, state, seconds=3.0)
    progress = reports.progress
    for node, why in reports.failures.items():
        out.note(
            f"{state.name_of(node)} did not report how far its copies are, and they are promoted last: {why}"
        )
    plan = planned_failover(state, args.name, progress, force=args.force)
    if plan.lossy:
        _show_losses(plan, state, out)
    if plan.lossy and not args.yes and not agreed(out, "lose these changes?"):
        raise InvalidArguments("nothing was changed; start the node, or answer yes, or add --yes")
    plan = fail_over_by_hand(store, args.name, progress, force=args.force)
    out.show(
        {
            "node": args.name,
            "promoted": len(plan.entries),
            "lossy": sorted(plan.lossy),
            "kept": {str(partition): seqno for partition, seqno in sorted(plan.kept.items())},
            "unavailable": list(plan.unavailable),
        },
        text=_failover_summary(plan, args.name, alive=plan.node in state.alive, forced=args.force),
    )
    return ExitCode.OK if not plan.unavailable else ExitCode.DIFFERENT


def _failover_summary(plan: FailoverByHand, name: str, *, alive: bool, forced: bool) -> str:
    lines = [f"{len(plan.entries)} partitions of {name} have another active copy"]
    if plan.lossy:
        lines.append(f"{len(plan.lossy)} of them lost what the new copy did not have")
    if left := len(plan.unavailable):
        if alive:
            lines.append(f"{left} partitions stay active on {name}: no other node that is alive has a copy")
        elif forced:
            lines.append(f"{left} partitions stay unavailable: no copy is alive; start a node that has one")
        else:
            lines.append(
                f"{left} partitions stay unavailable: no in-sync copy is alive; "
                f"start {name}, or add --force to promote copies that are out of date"
            )
    return "\n".join(lines)


def _show_losses(plan: FailoverByHand, state: ClusterState, out: Output) -> None:
    """Show what a failover by force loses."""
    for partition, node in sorted(plan.lossy.items())[:SHOWN]:
        name, kept = state.name_of(node), plan.kept.get(partition)
        copy = f"{name} is to become active, and is not in sync"
        if kept is None:
            out.note(f"partition {partition}: {copy}; acknowledged changes that it does not have are lost")
        else:
            out.note(f"partition {partition}: {copy}; acknowledged changes after seqno {kept} are lost")
    if len(plan.lossy) > SHOWN:
        out.note(f"... and {len(plan.lossy) - SHOWN} more")


def _set(args: Namespace, out: Output, store: AgreementStore) -> ExitCode:
    from upper.cluster.administration import change_settings
    from upper.errors import InvalidArguments

    values = {}
    for text in args.values:
        name, found, value = text.partition("=")
        if not found:
            raise InvalidArguments(f"{text!r} is not a setting; write NAME=VALUE, such as replicas=2")
        values[name.replace("-", "_")] = value
    settings = change_settings(store, values)
    out.show(
        {
            "replicas": settings.replicas,
            "acknowledge": settings.acknowledge,
            "minimum_copies": settings.minimum_copies,
        }
    )
    return ExitCode.OK


DO: dict[str, Callable[[Namespace, Output, AgreementStore], ExitCode]] = {
    "create": _create,
    "rebalance": _rebalance,
    "failover": _failover,
    "set": _set,
}
