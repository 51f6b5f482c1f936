"""Bugs in the prefix cache, and in sharing its pages."""

from mutants.mutant import BySeed, ByTest, Mutant
from simulation.scenario import ALIKE_SEED_MIN

OF_PREFIXES = (
    # A hit whose window is gone.
    Mutant(
        "a hit is found although the lowest page of its window is gone",
        "kvcache/prefix_cache.py",
        "if at is None or at.parts[index].kept_from > offset:",
        "if at is None or at.parts[index].kept_from > offset + 1:",
        ByTest("kvcache/test_prefix_cache_histories.py"),
    ),
    Mutant(
        "a hit is found although its window is gone",
        "kvcache/prefix_cache.py",
        "if at is None or at.parts[index].kept_from > offset:",
        "if at is None:",
        ByTest("kvcache/test_prefix_cache.py"),
    ),
    Mutant(
        "a boundary counts as one that can be hit although a page of its window is gone",
        "kvcache/prefix_cache.py",
        "                if needed < first:",
        "                if needed + 1 < first:",
        BySeed(first=ALIKE_SEED_MIN + 20, checks=False),
    ),
    Mutant(
        "a hit is thought to need its window from one position higher on",
        "kvcache/units.py",
        "needed = self.group.first_needed(self.end(len(known)))",
        "needed = self.group.first_needed(Tokens(self.end(len(known)) + 1))",
        BySeed(first=ALIKE_SEED_MIN, checks=False),
    ),
    Mutant(
        "a page of a window is evicted, and the hits that need it can still be found",
        "kvcache/prefix_tree.py",
        "            self._close(node)\n            self.prune(node)\n            while",
        "            self._trim(part)\n            part.ids = part.ids[1:]\n            while",
        ByTest("kvcache/test_prefix_cache.py"),
    ),
    Mutant(
        "of a tail pages count as written that no launch has written",
        "kvcache/prefix_row.py",
        "first = max(first, page if is_written else page + 1)",
        "first = max(first, page)",
        ByTest("kvcache/test_prefix_row.py"),
    ),
    Mutant(
        "a unit can be found before the launch that writes it is over",
        "kvcache/prefix_cache.py",
        "count = min(self._unit_count(row.chain, row.prompt), row.settled // self.unit)",
        "count = min(self._unit_count(row.chain, row.prompt), row.settled // self.unit + 1)",
        ByTest("kvcache/test_prefix_cache.py"),
    ),
    Mutant(
        "with all windows moved a hit needs the last one only",
        "kvcache/prefix_cache.py",
        "isinstance(group.reach, All) or (whole_windows and group.is_window)",
        "isinstance(group.reach, All)",
        ByTest("kvcache/test_prefix_cache.py"),
    ),
    Mutant(
        "a hit covers the whole prompt, and nothing is left to feed",
        "kvcache/prefix_cache.py",
        "return min(len(chain), (prompt - 1) // self.unit)",
        "return min(len(chain), prompt // self.unit)",
        ByTest("kvcache/test_prefix_cache.py"),
    ),
    Mutant(
        "units are published when their chunk is given out",
        "scheduler/chunks.py",
        "        seat.chunks.append(chunk)",
        "        seat.chunks.append(chunk)\n        worker.books.publish(seat.holding, until)",
        BySeed(first=ALIKE_SEED_MIN + 20, checks=False),
    ),
    Mutant(
        "a row begins where its prompt does, although it has a hit",
        "scheduler/placement.py",
        "position=seat.settled,",
        "position=0,",
        BySeed(first=ALIKE_SEED_MIN, checks=False),
    ),
    # Pages that are shared.
    Mutant(
        "a shared page is free when its first lessee goes",
        "kvcache/pool.py",
        "        if page in self._lessees:\n            return\n        if page in",
        "        if page in",
        ByTest("kvcache/test_pool_sharing.py"),
    ),
    Mutant(
        "a page is evicted while a launch of a row that has gone still reads it",
        "kvcache/pool.py",
        "is_used = page in self._lessees or page in self._readers\n        return",
        "is_used = page in self._lessees\n        return",
        ByTest("kvcache/test_pool_sharing.py"),
    ),
    Mutant(
        "a leased page of a window is promised to nobody in its place",
        "kvcache/books.py",
        "return Pages(self.lacks(group) + self.unpaid[group])",
        "return Pages(self.lacks(group))",
        ByTest("kvcache/test_books_cached.py"),
    ),
    Mutant(
        "a hit makes room for pages that are idle and counted as available too",
        "kvcache/books.py",
        "return max(0, reserve - len(pages)) + sum(map(self.pools[group].is_idle, pages))",
        "return max(0, reserve - len(pages))",
        ByTest("kvcache/test_prefix_cache_histories.py"),
    ),
    Mutant(
        "prompts of different salts have hashes in common",
        "kvcache/unit_hashes.py",
        "key=blake2b(salt).digest()",
        'key=blake2b(b"").digest()',
        ByTest("kvcache/test_unit_hashes.py"),
    ),
)
