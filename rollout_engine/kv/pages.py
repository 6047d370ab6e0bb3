"""PagePool: which pages are free, and how many hold on to each of the others."""

from __future__ import annotations

from collections.abc import Iterable


class PageAccountingError(Exception):
    """Pages were lost or counted twice: a bug of ours, never an input's fault."""


class PagePool:
    """Reference counts of `num_pages` pages of `page_size` token slots.

    A page is free (count 0) or held by sequences and, at most once, by the prefix cache.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._refs = [0] * num_pages
        self._free = list(reversed(range(num_pages)))  # the last one freed goes first: its memory is warm

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages needed for `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def take(self) -> int:
        """Hand out one free page with count 1; there must be one."""
        page = self._free.pop()
        self._refs[page] = 1
        return page

    def hold(self, page: int) -> int:
        """Count one more holder of a page that is in use; returns the new count."""
        assert self._refs[page] > 0, f"page {page} is free"
        self._refs[page] += 1
        return self._refs[page]

    def drop(self, page: int) -> int:
        """Count one holder less; at 0 the page is free again. Returns the new count."""
        assert self._refs[page] > 0, f"page {page} is free"
        self._refs[page] -= 1
        if self._refs[page] == 0:
            self._free.append(page)
        return self._refs[page]

    def refs(self, page: int) -> int:
        return self._refs[page]

    def check(self, held: Iterable[int]) -> None:
        """Compare all counts with `held`, one entry for each holder of each page.

        Raises:
            PageAccountingError: naming the first page whose count is wrong.
        """
        expected = [0] * self.num_pages
        for page in held:
            expected[page] += 1
        for page, (count, want) in enumerate(zip(self._refs, expected, strict=True)):
            if count != want:
                raise PageAccountingError(f"page {page} has {count} holders on the books, {want} in fact")
        num_unheld = expected.count(0)
        if sorted(self._free) != [page for page, count in enumerate(expected) if count == 0]:
            raise PageAccountingError(f"{len(self._free)} pages on the free list, {num_unheld} in fact")
