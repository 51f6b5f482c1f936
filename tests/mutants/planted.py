"""All the bugs that are planted."""

from mutants.mutant import Mutant
from mutants.of_chunks import OF_CHUNKS
from mutants.of_early import OF_EARLY
from mutants.of_limits import OF_LIMITS
from mutants.of_pages import OF_PAGES
from mutants.of_prefixes import OF_PREFIXES
from mutants.of_requests import OF_REQUESTS
from mutants.of_shares import OF_SHARES
from mutants.of_surplus import OF_SURPLUS

MUTANTS: tuple[Mutant, ...] = (
    *OF_PAGES,
    *OF_REQUESTS,
    *OF_PREFIXES,
    *OF_SHARES,
    *OF_SURPLUS,
    *OF_LIMITS,
    *OF_CHUNKS,
    *OF_EARLY,
)
