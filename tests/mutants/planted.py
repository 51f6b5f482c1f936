"""All the bugs that are planted."""

from mutants.mutant import Mutant
from mutants.of_pages import OF_PAGES
from mutants.of_prefixes import OF_PREFIXES
from mutants.of_requests import OF_REQUESTS

MUTANTS: tuple[Mutant, ...] = (*OF_PAGES, *OF_REQUESTS, *OF_PREFIXES)
