"""The oldest goes first, by the age that it has when it is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.kvcache.ageing import Age, Ageing


def test_the_oldest_is_taken_first_and_equals_in_the_order_in_which_they_came() -> None:
    ages = {"b": (2, 0), "a": (1, 9), "c": (2, 0)}
    ageing = Ageing[str](lambda thing: ages[thing])
    for thing in "bac":
        ageing.put(thing)
    assert [ageing.take_oldest() for _ in ages] == ["a", "b", "c"]


def test_what_became_younger_or_may_not_go_is_passed_over() -> None:
    ages: dict[str, Age | None] = {"a": (1,), "b": (2,), "c": (3,)}
    ageing = Ageing[str](lambda thing: ages[thing])
    for thing in "abc":
        ageing.put(thing)
    ages["a"], ages["b"] = (4,), None
    assert ageing.take_oldest() == "c"
    ages["b"] = (5,)
    ageing.put("b")
    assert ageing.take_oldest() == "a"
    assert ageing.take_oldest() == "b"


def test_what_became_older_is_taken_in_its_new_place_once() -> None:
    ages = {"a": (5,), "b": (3,)}
    ageing = Ageing[str](lambda thing: ages[thing])
    ageing.put("a")
    ageing.put("b")
    ages["a"] = (1,)
    ageing.put("a")
    assert [ageing.take_oldest(), ageing.take_oldest()] == ["a", "b"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=400))
def test_any_history_gives_the_smallest_present_age(steps: list[tuple[int, int]]) -> None:
    """Each step gives a thing an age; age 0 says that it may not go."""
    ages: dict[int, Age | None] = {}
    ageing = Ageing[int](lambda thing: ages[thing])
    for thing, age in steps:
        ages[thing] = (age,) if age else None
        ageing.put(thing)
    while left := {thing: age for thing, age in ages.items() if age is not None}:
        taken = ageing.take_oldest()
        assert ages[taken] == min(left.values())
        ages[taken] = None
