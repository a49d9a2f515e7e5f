"""Chooses the replica of a request.

The router needs a separate module. Ray Serve sends it to the replicas by value, so each of its
classes exists twice there, and `isinstance` would reject objects from the front.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray_call import ReplicaCall


class PrefixRouter(RequestRouter):
    """Router that sends requests with one prefix to one replica.

    If that replica is much busier than another one, it chooses the other one.
    """

    def initialize_state(self, most_ahead: int = 8) -> None:
        """Set by how much the preferred replica may be busier than the idlest one.

        most_ahead: a number of requests.
        """
        self._most_ahead = most_ahead
        self._open: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in order of preference.

        Rendezvous hashing moves few prefixes when replicas change.
        """
        if not candidate_replicas:
            return []
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        prefix = call.prefix if isinstance(call, ReplicaCall) else ""
        by_load = sorted(candidate_replicas, key=lambda one: self._open[one.replica_id.unique_id])
        if isinstance(call, ReplicaCall) and call.replica:
            by_load.sort(key=lambda one: one.replica_id.unique_id != call.replica)
            return [[one] for one in by_load[:1]]
        if not prefix:
            return [[one] for one in by_load]
        preferred = max(
            candidate_replicas,
            key=lambda one: hashlib.sha256(f"{prefix} {one.replica_id.unique_id}".encode()).digest(),
        )
        ahead = self._open[preferred.replica_id.unique_id] - self._open[by_load[0].replica_id.unique_id]
        if ahead > self._most_ahead:
            return [[one] for one in by_load]
        return [[preferred], *([one] for one in by_load if one is not preferred)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Count a request as open."""
        self._open[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:  # noqa: ARG002
        """Count a request as ended."""
        self._open[replica_id.unique_id] -= 1
