"""Which replica gets a request.

A module of its own, with nothing else in it: Ray Serve sends a router's module to the replicas by value, so that every
class in it exists there a second time and `isinstance` says no to the one that the front made.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deploy.ray_call import Call


class PrefixRouter(RequestRouter):
    """Sends requests of one prefix to one replica, unless that has much more to do than another."""

    def initialize_state(self, most_ahead: int = 8) -> None:  # type: ignore[override]
        """most_ahead: how many more open requests than the idlest replica the preferred one may have."""
        self._most_ahead = most_ahead
        self._open: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas in the order of preference: rendezvous hashing moves few prefixes when replicas come and go."""
        if not candidate_replicas:
            return []
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        prefix = call.prefix if isinstance(call, Call) else ""
        by_load = sorted(candidate_replicas, key=lambda one: self._open[one.replica_id.unique_id])
        if isinstance(call, Call) and call.replica:
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
        """A request has ended, somehow."""
        self._open[replica_id.unique_id] -= 1
