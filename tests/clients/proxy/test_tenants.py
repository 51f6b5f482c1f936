"""Whose request it is: a header says so, or the API key."""

import pytest

from fakes.fake_scheduler import FakeScheduler
from fakes.running_proxy import RunningProxy

FIELDS = {"prompt": [1], "max_tokens": 1}


async def tenant(proxy: RunningProxy, scheduler: FakeScheduler, **headers: str) -> str:
    """The tenant that the scheduler is told of a request with these headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = await proxy.http.post("/v1/completions", json=FIELDS, headers=named)
    assert response.status_code == 200, response.text
    assert (await proxy.line_of(response))["tenant"] == scheduler.requests[-1].submit.tenant
    return scheduler.requests[-1].submit.tenant


async def test_without_a_name_or_a_key_there_is_no_tenant(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.answer = [1]
    assert await tenant(proxy, scheduler) == ""
    for value in ("Bearer none", "Bearer EMPTY", "Bearer", "Basic dTpw"):
        assert await tenant(proxy, scheduler, Authorization=value) == ""


async def test_each_key_is_a_tenant_which_does_not_tell_the_key(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.answer = [1]
    first = await tenant(proxy, scheduler, Authorization="Bearer sk-secret-1")
    second = await tenant(proxy, scheduler, Authorization="bearer  sk-secret-2")
    assert first == await tenant(proxy, scheduler, Authorization="Bearer sk-secret-1")
    assert first != second and first.startswith("key-") and len(first) == 16
    assert "secret" not in first + second


async def test_the_header_goes_before_the_key(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.answer = [1]
    named = {"X_Tidegate_Tenant": "research team = 1"}
    assert await tenant(proxy, scheduler, **named) == "research team = 1"
    both = named | {"Authorization": "Bearer sk-secret-1"}
    assert await tenant(proxy, scheduler, **both) == "research team = 1"


@pytest.mark.parametrize("name", ["x" * 257, "caf\xe9", "a\tb"])
async def test_a_header_that_is_no_name_is_refused(proxy: RunningProxy, name: str) -> None:
    headers = {b"X-Tidegate-Tenant": name.encode("latin-1")}
    response = await proxy.http.post("/v1/completions", json=FIELDS, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "bad_header")
    assert "X-Tidegate-Tenant" in error["message"]


async def test_the_field_user_is_no_tenant(
    proxy: RunningProxy, scheduler: FakeScheduler
) -> None:
    scheduler.answer = [1]
    await proxy.complete(**FIELDS, user="somebody")
    assert scheduler.requests[-1].submit.tenant == ""


async def test_timeouts_are_handed_on(proxy: RunningProxy, scheduler: FakeScheduler) -> None:
    scheduler.answer = [1]
    await proxy.complete(**FIELDS, timeout_ms=1500, total_timeout_ms=60_000)
    submit = scheduler.requests[-1].submit
    assert (submit.timeout_ms, submit.total_timeout_ms) == (1500, 60_000)
    await proxy.complete(**FIELDS, timeout_ms=None)
    submit = scheduler.requests[-1].submit
    assert submit.timeout_ms is None and submit.total_timeout_ms is None
