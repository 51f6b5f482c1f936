"""What each tenant was given, counted from the outside, and whether that was its share.

Service is a request's computed prompt when it begins, and each token that it brings. What it
computes again after it gave way is no service. Only what the log and the clients are told is
used, and nothing of the core's own accounts.
"""

from fractions import Fraction

import msgspec

from simulation.memory import SimulationError
from simulation.scripts import Script

TOKEN_COST = 4  # Of a sampled token; a computed position of a prompt is 1.

Key = tuple[int, str]  # Priority and tenant.


class Begun(msgspec.Struct):
    """A request that has begun. `paid` are the positions that were service when they ran."""

    key: Key
    cost: int  # What it may come to in all.
    paid: int = 0
    token_count: int = 0


class Account(msgspec.Struct):
    """One tenant's requests of one priority. Amounts are divided by its weight."""

    weight: Fraction
    waiting: set[str] = msgspec.field(default_factory=set[str])  # Never iterated.
    service: Fraction = Fraction(0)
    begun_cost: Fraction = Fraction(0)  # Of those that have begun and not ended.
    begun_cost_max: Fraction = Fraction(0)

    def begin(self, cost: int) -> None:
        self.begun_cost += cost / self.weight
        self.begun_cost_max = max(self.begun_cost_max, self.begun_cost)


class Shares:
    """Raises `SimulationError` when two tenants that both wait differ by more than they may.

    `slack` is how far ahead a tenant may be whose request passes one that waits for pages.
    """

    def __init__(self, weights: dict[str, float], slack: int) -> None:
        self.accounts: dict[Key, Account] = {}
        self.most = Fraction(0)  # The largest difference, as a share of what it may be.
        self._weights = weights
        self._slack = slack
        self._begun: dict[str, Begun] = {}
        self._waiting: dict[str, tuple[Key, int]] = {}
        self._since: dict[
            tuple[Key, Key], Fraction
        ] = {}  # Differences when both began to wait.

    def accept(self, script: Script, max_tokens: int) -> None:
        key = (script.priority, script.tenant)
        account = self.accounts.get(key)
        if account is None:
            weight = Fraction(self._weights.get(script.tenant, 1.0))
            account = self.accounts[key] = Account(weight)
        account.waiting.add(script.request_id)
        cost = script.prompt_tokens + TOKEN_COST * max_tokens
        self._waiting[script.request_id] = (key, cost)
        if len(account.waiting) == 1:
            for other, theirs in self.accounts.items():
                if other != key and other[0] == key[0] and theirs.waiting:
                    self._since[key, other] = account.service - theirs.service

    def begin(self, script: Script, output_tokens: int, cached_tokens: int) -> None:
        """It is admitted, for the first time or anew."""
        name = script.request_id
        begun = self._begun.get(name)
        if begun is None:
            key, cost = self._waiting[name]
            self._stop_waiting(name)
            begun = self._begun[name] = Begun(key, cost)
            self.accounts[key].begin(cost)
        computed = script.prompt_tokens + output_tokens - cached_tokens
        new = max(0, computed - begun.paid - output_tokens)
        begun.paid += new
        self._serve(begun, new)

    def emit(self, name: str, token_count: int) -> None:
        begun = self._begun[name]
        begun.token_count += token_count
        self._serve(begun, TOKEN_COST * token_count)

    def finish(self, name: str, charged_tokens: int) -> None:
        begun = self._begun.pop(name, None)
        if begun is None:
            if charged_tokens:
                raise SimulationError(f"request {name} pays, and never began")
            self._stop_waiting(name)
            return
        account = self.accounts[begun.key]
        # Positions that never ran are given back.
        given_back = begun.paid + TOKEN_COST * begun.token_count - charged_tokens
        if not 0 <= given_back <= begun.paid or (given_back and begun.token_count):
            raise SimulationError(f"request {name} pays {charged_tokens}, which is wrong")
        account.service -= given_back / account.weight
        account.begun_cost -= begun.cost / account.weight

    def _stop_waiting(self, name: str) -> None:
        key, _ = self._waiting.pop(name)
        account = self.accounts[key]
        account.waiting.remove(name)
        if not account.waiting:
            self._since = {pair: at for pair, at in self._since.items() if key not in pair}

    def _serve(self, begun: Begun, tokens: int) -> None:
        self.accounts[begun.key].service += tokens / self.accounts[begun.key].weight
        for (mine, theirs), since in self._since.items():
            one, other = self.accounts[mine], self.accounts[theirs]
            bound = 2 * (self._slack + one.begun_cost_max + other.begun_cost_max)
            difference = abs(one.service - other.service - since)
            if bound:
                self.most = max(self.most, difference / bound)
            if difference > bound:
                raise SimulationError(f"{mine} and {theirs} differ by {float(difference):.0f}")
