"""The state of a cluster as one JSON document: nodes, partitions, lag and moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from upper.cluster.bucket_map import BucketMap, NodeId
from upper.cluster.failover import Progress
from upper.cluster.members import ClusterState
from upper.cluster.moves import held
from upper.cluster.reports import NodeReport, NodeReports
from upper.model.values import Partition


def described(state: ClusterState, asked: NodeReports) -> dict[str, Any]:
    """The document. Where a node did not answer, `problem` is the reason, and its lag is None."""
    reports = asked.by_node
    bucket_map = state.bucket_map
    counts = held(bucket_map) if bucket_map is not None else {}
    nodes = []
    for node, member in sorted(state.members.items(), key=lambda one: one[1].name):
        active, replica = counts.get(node, (0, 0))
        report = reports.get(node)
        nodes.append(
            {
                "name": member.name,
                "address": member.address,
                "alive": node in state.alive,
                "active": active,
                "replica": replica,
                "zone": member.zone,
                "lease_age": None if report is None else report.lease_age,
                "problem": str(asked.failures[node]) if node in asked.failures else None,
                "version": member.version,
                "id": node,
            }
        )
    document: dict[str, Any] = {
        "bucket": None if bucket_map is None else bucket_map.settings.name,
        "revision": state.map_revision,
        "controller": None if state.controller is None else state.name_of(state.controller),
        "nodes": nodes,
        "partitions": [],
        "moves": [],
        "rebalance": None,
    }
    if bucket_map is None:
        return document
    settings = bucket_map.settings
    document["settings"] = {
        "partitions": settings.partitions,
        "replicas": settings.replicas,
        "acknowledge": settings.acknowledge,
        "minimum_copies": settings.minimum_copies,
    }
    document["partitions"] = _partitions(state, bucket_map, reports)
    if (running := state.rebalance) is not None:
        left = running.remaining(bucket_map)
        document["rebalance"] = {
            "reason": running.reason,
            "total": running.total,
            "done": max(0, running.total - len(left)),
            "remove": [state.name_of(node) for node in running.remove],
            "at_once": running.at_once,
            "rate": running.rate,
        }
        document["moves"] = [
            {
                "partition": int(move.partition),
                "add": [state.name_of(node) for node in move.add],
                "remove": [state.name_of(node) for node in move.remove],
                "active": state.name_of(move.active),
            }
            for move in left
        ]
    return document


def _partitions(
    state: ClusterState, bucket_map: BucketMap, reports: Mapping[NodeId, NodeReport]
) -> list[dict[str, Any]]:
    found = []
    for number, entry in enumerate(bucket_map.entries):
        at = {node: _progress(reports, node, Partition(number)) for node in entry.copies}
        head = at[entry.active]
        lags = [
            max(0, head[1] - reached[1]) if reached[0] == head[0] else head[1]
            for node in entry.replicas
            if head is not None and (reached := at[node]) is not None
        ]
        found.append(
            {
                "id": number,
                "epoch": entry.epoch,
                "active": state.name_of(entry.active),
                "replicas": [state.name_of(node) for node in entry.replicas],
                "in_sync": [state.name_of(node) for node in entry.copies if node in entry.in_sync],
                "moving_to": None if entry.moving_to is None else state.name_of(entry.moving_to),
                "available": entry.active in state.alive,
                "lag": max(lags, default=None),
            }
        )
    return found


def _progress(reports: Mapping[NodeId, NodeReport], node: NodeId, partition: Partition) -> Progress | None:
    report = reports.get(node)
    return None if report is None else report.copies.get(partition)


def summary(document: Mapping[str, Any]) -> list[str]:
    """The most important facts for an operator, one sentence a line."""
    if document["bucket"] is None:
        return ["no bucket yet; create one with `upper cluster create STORE`"]
    settings, partitions = document["settings"], document["partitions"]
    wanted = settings["replicas"] + 1
    full = sum(len(one["in_sync"]) >= wanted for one in partitions)
    gone = sum(not one["available"] for one in partitions)
    lags = [one["lag"] for one in partitions if one["lag"] is not None]
    lines = [
        f"bucket {document['bucket']}: {settings['partitions']} partitions, "
        f"replicas={settings['replicas']}, acknowledge={settings['acknowledge']}, "
        f"minimum-copies={settings['minimum_copies']}; revision {document['revision']}, "
        f"controller {document['controller'] or 'none'}",
        f"in sync: {full} of {len(partitions)} partitions have all {wanted} copies in sync"
        + (f"; lag: at most {max(lags)} changes" if lags else ""),
    ]
    if silent := {node["name"]: node["problem"] for node in document["nodes"] if node["problem"]}:
        lines.append(f"lease and lag of {', '.join(silent)} are not known: {next(iter(silent.values()))}")
    if gone:
        lines.append(f"UNAVAILABLE: {gone} partitions have no active copy that is alive")
    if (running := document["rebalance"]) is not None:
        lines.append(
            f"rebalance ({running['reason']}): {running['done']} of {running['total']} moves are done, "
            f"{running['at_once']} at once per node"
            + (f" and {running['rate']:,} bytes per second" if running["rate"] else "")
        )
    return lines
