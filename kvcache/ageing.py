"""The order in which things are given up: a heap that is put right when it is asked."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Thing = TypeVar("Thing")
Age = tuple[int, ...]

_SPARE_COUNT = 64


class Ageing(Generic[Thing]):
    """Things by age, smallest first; `age_of` says a thing's present age, or None if it may
    not be given up. Whoever makes a thing younger, or free to be given up, calls `put`."""

    def __init__(self, age_of: Callable[[Thing], Age | None]) -> None:
        self._age_of = age_of
        self._heap: list[tuple[Age, int, Thing]] = []
        self._serial = 0  # Orders things of the same age, which need not be comparable.
        self._count_max = _SPARE_COUNT

    def put(self, thing: Thing) -> None:
        age = self._age_of(thing)
        if age is None:
            return
        self._serial += 1
        heappush(self._heap, (age, self._serial, thing))
        if len(self._heap) > self._count_max:
            self._tidy()

    def take_oldest(self) -> Thing:
        """Remove and return the thing of smallest age. There must be one."""
        while True:
            age, _, thing = heappop(self._heap)
            present = self._age_of(thing)
            if present == age:
                return thing
            if present is not None and present > age:
                self.put(thing)

    def _tidy(self) -> None:
        """Drop what is out of date, so that the heap stays within twice what it orders."""
        present = {thing: (self._age_of(thing), n, thing) for _, n, thing in self._heap}
        self._heap = [(age, n, thing) for age, n, thing in present.values() if age is not None]
        heapify(self._heap)
        self._count_max = 2 * len(self._heap) + _SPARE_COUNT
