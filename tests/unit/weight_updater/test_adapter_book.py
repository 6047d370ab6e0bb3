"""The book of adapters: slots, versions, and over which base weights they are right."""

from __future__ import annotations

from weight_updater.adapters import MAX_REMOVED, AdapterBook

BASE = (3, 0xABC)


def test_the_next_version_goes_beside_the_one_that_is_live():
    book = AdapterBook(2)
    for version in range(1, 6):
        slot = book.spare_slot()
        assert slot not in {adapter.slot for adapter in book.held.values()}
        book.commit("a", version, slot, 4, 0, BASE)
    other = book.commit("b", 1, book.spare_slot(), 4, 0, BASE)
    assert len({book.held["a"].slot, other.slot, book.spare_slot()}) == 3
    assert {book.held["a"].slot, other.slot, book.spare_slot()} == {1, 2, 3}, "0 is the base model's"


def test_numbers_tell_versions_of_all_adapters_apart():
    book = AdapterBook(2)
    numbers = [book.commit(name, 1, book.spare_slot(), 1, 0, BASE).number for name in ("a", "b")]
    book.remove("a")
    numbers.append(book.commit("a", 1, book.spare_slot(), 1, 0, BASE).number)
    assert numbers == [1, 2, 3]
    assert book.number("") == 0


def test_an_adapter_is_stale_over_other_bytes_only():
    book = AdapterBook(1)
    held = book.commit("a", 1, 1, 4, 7, BASE)
    for base, stale in (((3, 0xABC), False), ((4, 0xDEF), True), ((5, 0xABC), False), ((6, 0), True)):
        book.base_changed(base)
        assert book.is_stale(held) == stale, base
    unknown = book.commit("a", 2, 2, 4, 7, (6, 0))
    assert not book.is_stale(unknown), "nothing was committed since"
    book.base_changed((7, 0))
    assert book.is_stale(unknown), "unknown bytes are not the same as unknown bytes"


def test_versions_of_removed_adapters_are_remembered_up_to_a_bound():
    book = AdapterBook(1)
    for number in range(MAX_REMOVED + 5):
        book.commit(f"a{number}", 9, 1, 4, 0, BASE)
        book.remove(f"a{number}")
    book.commit("last", 1, 1, 4, 0, BASE)
    assert book.highest("a0") == 0
    assert book.highest(f"a{MAX_REMOVED + 4}") == 9
    assert len(book._highest) == MAX_REMOVED + 1
