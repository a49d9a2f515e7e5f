"""Places for states of recurrent layers: the seats of running sequences, and cached states.

A state is a function of the text before it. A sequence's seat has the state at the end of the text
that its last pass read, so passes repeat no other tokens than accepted drafts. A cached state comes
after a full block and has the block's key, as its K and V do. A text can start from a cached prefix
only where it has a state. Cached states are stored at the end of a prompt, where a text leaves
another one that began alike, and at the last block that a sequence has read. The least recently
used cached state is replaced first. No torch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.plan import StatePlaces
from engine.scheduling.store import Key

NOTHING = -1


@dataclass(eq=False)
class SequenceStates:
    """Places of a sequence's states in one model."""

    seat: int = NOTHING
    source: int = NOTHING
    """Place of the state from which its next pass starts."""
    covered: int = 0
    """Tokens before that state's end."""
    kept: list[tuple[int, int]] = field(default_factory=list)
    """(tokens, place) of cached states that its next pass stores."""
    moving: Key | None = None
    """Cached state that a later one of the sequence replaces."""

    @property
    def places(self) -> StatePlaces | None:
        if self.seat == NOTHING:
            return None
        return StatePlaces(self.seat, self.source, self.covered, tuple(self.kept))


class StateStore:
    """Places of the states of one model."""

    def __init__(self, seats: Sequence[int], cached: Sequence[int] = ()) -> None:
        self.seats = seats
        self.cached = cached
        self.num_hits = 0
        """Texts that started from a cached state."""
        self.num_evicted = 0
        self._free_seats = list(reversed(seats))
        self._free = list(cached)
        self._place_of: OrderedDict[Key, int] = OrderedDict()
        """The least recently used first."""
        self._num_holders: Counter[int] = Counter()
        """Sequences that read a cached state in their next pass, or store it."""
        self._unread: set[Key] = set()

    def portion(self, number: int, count: int) -> StateStore:
        """Return a store with a portion of the seats for measurements; it caches nothing."""
        return StateStore(self.seats[number::count])

    @property
    def has_seat(self) -> bool:
        return bool(self._free_seats)

    @property
    def num_used(self) -> int:
        """Return the number of seats of sequences, and of cached states."""
        return len(self.seats) - len(self._free_seats) + len(self._place_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._place_of

    def deepest(self, keys: Sequence[Key]) -> int:
        """Return the number of leading blocks of the longest prefix with a state."""
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in self), 0)

    def start(self, states: SequenceStates, key: Key, covered: int) -> None:
        """Let a sequence start from a cached state."""
        states.source = self._place_of[key]
        states.covered = covered
        self._place_of.move_to_end(key)
        self._unread.discard(key)
        self._num_holders[states.source] += 1

    def sit(self, states: SequenceStates) -> None:
        """Give a sequence a seat."""
        states.seat = self._free_seats.pop()
        self.num_hits += states.source != NOTHING

    def keep(self, states: SequenceStates, key: Key, end: int, is_fixed: bool) -> None:
        """Let a sequence's next pass store a cached state; end: tokens before its end.

        is_fixed: whether no later state of the sequence replaces it.
        """
        if key in self:
            self._place_of.move_to_end(key)
            return
        place = self._take(None if is_fixed else states.moving)
        if place is None:
            return
        self._place_of[key] = place
        self._num_holders[place] += 1
        self._unread.add(key)
        states.kept.append((end, place))
        if not is_fixed:
            states.moving = key

    def advance(self, states: SequenceStates, covered: int) -> None:
        """Note that a sequence's pass has stored its states, up to this number of tokens."""
        self._release([states.source, *(place for _, place in states.kept)])
        states.source = states.seat
        states.covered = covered
        states.kept = []

    def leave(self, states: SequenceStates) -> None:
        """Release the places of a sequence; states that it did not store are forgotten."""
        unstored = {place for _, place in states.kept}
        self.forget([key for key, place in self._place_of.items() if place in unstored])
        self._release([states.source, *unstored])
        if states.seat != NOTHING:
            self._free_seats.append(states.seat)

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove cached states; places of sequences are free after their next pass."""
        for key in keys:
            place = self._place_of.pop(key, None)
            self._unread.discard(key)
            if place is not None and not self._num_holders[place]:
                self._free.append(place)

    def forget_all(self) -> None:
        self.forget(list(self._place_of))

    def check_invariants(self, running: Iterable[SequenceStates]) -> None:
        """Raise AssertionError unless the places of running sequences agree with the accounting."""
        running = list(running)
        taken = [states.seat for states in running]
        assert sorted([*taken, *self._free_seats]) == sorted(self.seats), "a seat is lost"
        held = Counter(place for states in running for _, place in states.kept)
        held.update(states.source for states in running if states.source in self.cached)
        assert held == +self._num_holders, "a state has unknown readers"
        cached = set(self._place_of.values())
        assert len(cached) == len(self._place_of), "two states share a place"
        assert sorted([*self._free, *(cached | held.keys())]) == sorted(self.cached), "a place is lost"

    def _take(self, replaced: Key | None) -> int | None:
        """Return a place without holders; None if all have some."""
        if replaced in self._unread and not self._num_holders[self._place_of[replaced]]:
            self.forget([replaced])
        elif not self._free:
            oldest = next((key for key, place in self._place_of.items() if not self._num_holders[place]), None)
            if oldest is None:
                return None
            self.forget([oldest])
            self.num_evicted += 1
        return self._free.pop()

    def _release(self, places: Iterable[int]) -> None:
        """Release cached places that a sequence holds; other places are ignored."""
        for place in places:
            if not self._num_holders[place]:
                continue
            self._num_holders[place] -= 1
            is_forgotten = place not in self._place_of.values()
            if not self._num_holders[place] and is_forgotten:
                self._free.append(place)
