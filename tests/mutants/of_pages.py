"""Bugs in counting pages, and in the books that say whose they are."""

from mutants.mutant import BySeed, ByTest, Mutant
from simulation.scenario import TIGHT_SEED_MIN

OF_PAGES = (
    Mutant(
        "withdrawn pages are free before the worker has answered",
        "kvcache/books.py",
        "while self._draining and self._draining[0].plan <= plan:",
        "while self._draining:",
        BySeed(checks=False),
    ),
    Mutant(
        "withdrawn pages are free one plan too early",
        "kvcache/books.py",
        "while self._draining and self._draining[0].plan <= plan:",
        "while self._draining and self._draining[0].plan <= plan + 1:",
        BySeed(checks=False),
    ),
    Mutant(
        "the floor of a window group lacks the page of the edge",
        "kvcache/demand.py",
        "return Pages(page_count(Tokens(window + ahead - 2), page_tokens) + 1)",
        "return Pages(max(1, page_count(Tokens(window + ahead - 2), page_tokens)))",
    ),
    Mutant(
        "pages that are promised to one request are taken by another",
        "kvcache/books.py",
        "limit = holding.lacks(group) + (self.available(group) if surplus else 0)",
        "limit = self.pools[group].free_count",
        BySeed(first=20),
    ),
    Mutant(
        "a hand-off leaves out the first position that decode reads",
        "kvcache/page_table.py",
        "else group.first_needed(first_query)",
        "else group.first_needed(Tokens(first_query + 1))",
        BySeed(checks=False),
    ),
    Mutant(
        "decode begins without a page for its first token",
        "kvcache/demand.py",
        "begun = Tokens(min(lengths.end, lengths.prompt + 1))",
        "begun = Tokens(min(lengths.end, lengths.prompt) - 1)",
        BySeed(first=TIGHT_SEED_MIN),
    ),
    # Off by one in the counting itself. The simulator's pages are counted by the same code, and
    # most of these it would not see.
    Mutant(
        "a request is counted with the position of its last token, which is never fed",
        "kvcache/demand.py",
        "return Tokens(self.prompt + self.output - 1)",
        "return Tokens(self.prompt + self.output)",
        ByTest("simulation/test_law.py"),
    ),
    Mutant(
        "a request is counted without its last position",
        "kvcache/demand.py",
        "return Tokens(self.prompt + self.output - 1)",
        "return Tokens(self.prompt + self.output - 2)",
    ),
    Mutant(
        "a hand-off is counted from one position too high",
        "kvcache/demand.py",
        "moved = group.span(group.first_needed(lengths.prompt), lengths.prompt)",
        "moved = group.span(group.first_needed(Tokens(lengths.prompt + 1)), lengths.prompt)",
        ByTest("kvcache/test_demand.py"),
    ),
    Mutant(
        "a short prompt is counted without its last page in a window group",
        "kvcache/demand.py",
        "floor = min(group.pages(end), longest_residency(reach, page_tokens, Tokens(1)))",
        "floor = min(\n"
        "            group.pages(Tokens(max(1, end - 1))),\n"
        "            longest_residency(reach, page_tokens, Tokens(1)),\n"
        "        )",
        BySeed(first=30),
    ),
    Mutant(
        "a tail is counted as if it ended where its overlap begins to count",
        "kvcache/demand.py",
        "for n in range(reach.ratio * reach.overlap + period)",
        "for n in range(period)",
        ByTest("kvcache/test_demand.py"),
    ),
    Mutant(
        "with the flag false the window pages of the prompt are not counted",
        "kvcache/demand.py",
        "isinstance(group.reach, All) or (whole_prompt and group.is_window)",
        "isinstance(group.reach, All)",
    ),
    Mutant(
        "with the flag false a worker that hands nothing over keeps the windows too",
        "kvcache/demand.py",
        "return leg is not Leg.WHOLE and flag is False",
        "return flag is False",
        BySeed(first=90),
    ),
    Mutant(
        "a window is a position shorter than it is",
        "kvcache/layout.py",
        "return Tokens(max(0, position - window + 1))",
        "return Tokens(max(0, position - window + 2))",
        ByTest("kvcache/test_layout.py"),
    ),
    Mutant(
        "a range that ends with a page is counted with the next one",
        "kvcache/layout.py",
        "return Pages((end - 1) // page_tokens - start // page_tokens + 1)",
        "return Pages(end // page_tokens - start // page_tokens + 1)",
        ByTest("kvcache/test_layout.py"),
    ),
    # Freed twice, early or never.
    Mutant(
        "withdrawn pages are freed twice",
        "kvcache/books.py",
        "            self._draining.append(drained)",
        "            self._draining.extend((drained, drained))",
        BySeed(checks=False),
    ),
    Mutant(
        "pages below the window are free, and stay with their holding too",
        "kvcache/page_table.py",
        "del self._ids[:count]",
        "del self._ids[: max(0, count - 1)]",
        BySeed(checks=False),
    ),
    Mutant(
        "a withdrawn page is never free again",
        "kvcache/books.py",
        "pool.end_drain(drained.owned[group])",
        "pool.end_drain(drained.owned[group][1:])",
        BySeed(checks=False),
    ),
    Mutant(
        "pages below the window are kept to the end",
        "kvcache/books.py",
        "if first > 0:",
        "if first > 1000:",
        BySeed(checks=False),
    ),
    Mutant(
        "what a holding did not use of its promise is lost when it ends",
        "kvcache/books.py",
        "            self._promised[group] -= holding.promised(group)\n            pages",
        "            pages",
        BySeed(checks=False),
    ),
)
