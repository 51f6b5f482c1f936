"""The trio client against a scheduler of the real protocol."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from fakes.behaviours import answer, answer_and_hang, fail, hang, ignore
from fakes.fake_scheduler import FakeRequest, FakeScheduler
from fakes.tiny_tokenizers import END, byte_level
from fakes.waiting import until
from tidegate.clients.library import (
    AsyncClient,
    ConnectFailed,
    EndReason,
    RequestFailed,
    RequestRefused,
    ServerLost,
    TextUnavailable,
)
from tidegate.ipc.protocol import (
    Card,
    Finished,
    NewTokens,
    Ping,
    Refused,
    RequestId,
    StreamId,
    Usage,
    encode,
    pack_ids,
)


def ids_of(text: str) -> list[int]:
    return byte_level().encode(text).ids


def letters(text: str) -> list[int]:
    """A token for each letter."""
    vocabulary = byte_level().get_vocab()
    return [vocabulary[letter] for letter in text]


async def until_cancelled(request: FakeRequest) -> None:
    with trio.fail_after(10):
        await request.cancelled.wait()


async def test_tokens_come_with_their_text(scheduler: FakeScheduler) -> None:
    ids = ids_of("the cat €")
    scheduler.behaviour = answer(*[[token_id] for token_id in ids])
    async with (
        AsyncClient(scheduler.endpoint) as client,
        client.generate("the dog", max_tokens=len(ids)) as generation,
    ):
        tokens = [token async for token in generation]
    assert [token.id for token in tokens] == ids
    assert [token.index for token in tokens] == list(range(len(ids)))
    assert "".join(token.text for token in tokens) == "the cat €"
    result = generation.result
    assert result is not None
    assert (result.text, result.token_ids) == ("the cat €", tuple(ids))
    assert (result.reason, result.request_id, result.seed) == (EndReason.LENGTH, "e1-1", 7)
    assert result.usage == Usage(len(ids_of("the dog")), 0, len(ids))
    assert scheduler.requests[0].prompt == tuple(ids_of("the dog"))


async def test_a_prompt_of_ids_is_sent_as_it_is(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        await client.complete([5, 4, 3], max_tokens=1)
    assert scheduler.requests[0].prompt == (5, 4, 3)


async def test_all_options_reach_the_scheduler(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        await client.complete(
            [1],
            max_tokens=2,
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.1,
            seed=11,
            stop="xyz",
            stop_token_ids=[9],
            ignore_eos=True,
            tenant="t",
            priority=4,
            timeout_ms=1000,
            total_timeout_ms=2000,
            model="tiny",
        )
    submit = scheduler.requests[0].submit
    assert (submit.sampling.temperature, submit.sampling.top_k) == (0.5, 3)
    assert (submit.sampling.top_p, submit.sampling.min_p, submit.seed) == (0.9, 0.1, 11)
    assert submit.stop_ids == b"\x09\0\0\0"
    assert submit.has_stop_text
    assert submit.ignore_eos
    assert (submit.tenant, submit.priority) == ("t", 4)
    assert (submit.timeout_ms, submit.total_timeout_ms) == (1000, 2000)
    assert (submit.model, submit.max_tokens) == ("tiny", 2)


async def test_an_unknown_option_is_a_type_error(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        with pytest.raises(TypeError, match="max_token"):
            client.generate([1], max_token=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("bad", [{"stop": ""}, {"stop": ["a", ""]}, {"stop_token_ids": [-1]}])
async def test_arguments_that_can_never_be_right_are_value_errors(
    scheduler: FakeScheduler, bad: dict[str, object]
) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        with pytest.raises(ValueError, match="stop"):
            await client.complete([1], **bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="prompt: -3 is no token id"):
            await client.complete([1, -3])
        with pytest.raises(ValueError, match="need detokenise=True"):
            await client.complete([1], stop="a", detokenise=False)
    assert not scheduler.requests


async def test_a_stop_string_ends_the_answer_and_the_request(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer_and_hang(*[[i] for i in letters("thecatsat")])
    async with AsyncClient(scheduler.endpoint) as client:
        generation = client.generate([1], stop=["tsa"], max_tokens=99)
        text = "".join([token.text async for token in generation])
        await until_cancelled(scheduler.requests[0])
    assert text == "theca"
    assert generation.result is not None
    assert (generation.result.text, generation.result.reason) == (text, EndReason.STOP_TEXT)
    cancel = scheduler.requests[0].cancels[0]
    assert (cancel.reason, cancel.kept) == (EndReason.STOP_TEXT, len("thecatsa"))
    assert generation.result.usage.output_tokens == cancel.kept


async def test_no_cancel_follows_a_normal_end(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer(ids_of("the cat"), reason=EndReason.END_TOKEN)
    async with AsyncClient(scheduler.endpoint) as client:
        for _ in range(5):
            await client.complete([1], max_tokens=99)
            async for _ in client.generate([1], max_tokens=99):
                pass
        await client.status()
    assert not any(request.cancels for request in scheduler.requests)
    assert not scheduler.unknown_cancels


async def test_an_end_token_is_counted_but_not_shown(scheduler: FakeScheduler) -> None:
    end = byte_level().token_to_id(END)
    assert end is not None
    scheduler.behaviour = answer([*ids_of("the cat"), end], reason=EndReason.END_TOKEN)
    async with AsyncClient(scheduler.endpoint) as client:
        result = await client.complete([1], max_tokens=99)
    assert result.text == "the cat"
    assert result.token_ids[-1] == end
    assert result.usage.output_tokens == len(ids_of("the cat")) + 1


async def test_text_kept_back_until_the_end_comes_with_the_last_token(
    scheduler: FakeScheduler,
) -> None:
    ids = ids_of("a€")[:-1]  # The last character is not whole.

    async def behave(request: FakeRequest) -> None:
        request.accept()
        request.tokens(ids)
        await trio.sleep(0.05)  # The end comes by itself, later than the tokens.
        request.finish(EndReason.LENGTH)

    scheduler.behaviour = behave
    async with AsyncClient(scheduler.endpoint) as client:
        tokens = [token async for token in client.generate([1], max_tokens=len(ids))]
    assert [token.id for token in tokens] == ids
    assert [token.text for token in tokens] == ["a", "", "\ufffd"]


async def test_tokens_without_text_need_no_card(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        result = await client.complete([1], max_tokens=3, detokenise=False)
    assert result.token_ids == tuple(scheduler.answer[:3])
    assert result.text == ""
    assert scheduler.question_count == 0


async def test_the_card_is_fetched_once(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client, trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(client.complete, "the cat")
    assert scheduler.question_count == 1


async def test_status_and_card_are_told(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        status = await client.status()
        card = await client.card()
    assert (status.ready, status.pools[0].page_count) == (True, 64)
    assert card == scheduler.card


async def test_text_before_a_worker_has_joined_says_so(scheduler: FakeScheduler) -> None:
    card, scheduler.card = scheduler.card, None
    async with AsyncClient(scheduler.endpoint) as client:
        with pytest.raises(TextUnavailable, match="no worker has joined"):
            await client.complete("the cat")
        scheduler.card = card
        assert (await client.complete("the cat", max_tokens=1)).text


# --- Leaving early ---


async def test_leaving_the_block_cancels(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer_and_hang([1, 2])
    async with AsyncClient(scheduler.endpoint) as client:
        async with client.generate([1], max_tokens=99) as generation:
            async for _ in generation:
                break
        await until_cancelled(scheduler.requests[0])
        with pytest.raises(RequestFailed, match="was cancelled"):
            async for _ in generation:
                pass
    assert scheduler.requests[0].cancels[0].reason is EndReason.CANCELLED


async def test_a_break_out_of_a_bare_loop_cancels(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer_and_hang([1, 2])
    async with AsyncClient(scheduler.endpoint) as client:
        async for token in client.generate([1], max_tokens=99):
            assert token.id == 1
            break
        gc.collect()
        await until_cancelled(scheduler.requests[0])


@pytest.mark.parametrize("behaviour", [ignore, hang])
async def test_a_cancelled_scope_cancels_in_every_phase(
    scheduler: FakeScheduler, behaviour: object
) -> None:
    scheduler.behaviour = behaviour  # type: ignore[assignment]
    async with AsyncClient(scheduler.endpoint) as client:

        async def read() -> None:
            async with client.generate([1], max_tokens=99) as generation:
                async for _ in generation:
                    pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: bool(scheduler.requests))
            await trio.sleep(0.05)
            nursery.cancel_scope.cancel()
        await until_cancelled(scheduler.requests[0])


async def test_a_timeout_around_one_token_loses_nothing(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer(*[[i] for i in range(1, 6)], gap_s=0.05)
    async with AsyncClient(scheduler.endpoint) as client:
        got: list[int] = []
        async with client.generate([1], max_tokens=5, detokenise=False) as generation:
            while generation.result is None:
                with trio.move_on_after(0.01):
                    got.extend(token.id for token in await generation.read())
    assert got == [1, 2, 3, 4, 5]


async def test_closing_the_client_cancels_what_is_open(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = hang
    async with AsyncClient(scheduler.endpoint) as client:
        generation = client.generate([1])
        await generation.start()
    await until_cancelled(scheduler.requests[0])


async def test_an_error_in_the_block_comes_out_as_it_is(scheduler: FakeScheduler) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with AsyncClient(scheduler.endpoint):
            raise KeyError("mine")


# --- Errors ---


async def test_a_refusal_tells_pool_need_and_limit(scheduler: FakeScheduler) -> None:
    async def behave(request: FakeRequest) -> None:
        where = {"pool": "full", "needed": 70, "limit": 64, "role": "decode", "worker": "d1"}
        request.refuse(400, "kv_pool_exceeded", "it does not fit", **where)

    scheduler.behaviour = behave
    async with AsyncClient(scheduler.endpoint) as client:
        with pytest.raises(RequestRefused, match="it does not fit") as caught:
            async with client.generate([1]):
                pass
    error = caught.value
    assert (error.status, error.code, error.pool) == (400, "kv_pool_exceeded", "full")
    assert (error.needed, error.limit, error.role, error.worker) == (70, 64, "decode", "d1")


async def test_a_failure_comes_after_the_tokens_before_it(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = fail(1, 2, text="the worker died", status=502)
    got: list[int] = []
    async with AsyncClient(scheduler.endpoint) as client:
        generation = client.generate([1], detokenise=False)
        got.append((await anext(generation)).id)
        got.append((await anext(generation)).id)
        with pytest.raises(RequestFailed, match="the worker died") as caught:
            await anext(generation)
    assert got == [1, 2]
    assert (caught.value.status, caught.value.code) == (502, "error")


async def test_a_failure_has_what_came_before_it(scheduler: FakeScheduler) -> None:
    async def behave(request: FakeRequest) -> None:
        request.accept()
        for token_id in letters("abc"):
            request.tokens([token_id])
        request.finish(EndReason.TIMEOUT, "its own timeout passed", 503)

    scheduler.behaviour = behave
    async with AsyncClient(scheduler.endpoint) as client:
        with pytest.raises(RequestFailed, match="its own timeout passed") as caught:
            await client.complete([1, 2], max_tokens=9, stop="abcd")
        tokens = client.generate([1, 2], max_tokens=9, stop="abcd")
        got = [await anext(tokens) for _ in range(3)]
        with pytest.raises(RequestFailed):
            await anext(tokens)
    partial = caught.value.partial
    assert partial is not None
    assert partial.token_ids == tuple(letters("abc")) == tuple(token.id for token in got)
    assert partial.text == "".join(token.text for token in got) == "abc"
    assert partial.reason is EndReason.TIMEOUT and partial.max_tokens == 9
    assert partial.usage == Usage(2, 0, 3)


async def test_requests_that_fail_together_each_have_their_own(
    scheduler: FakeScheduler,
) -> None:
    scheduler.behaviour = answer_and_hang([5])
    async with AsyncClient(scheduler.endpoint) as client:
        one = client.generate([1], detokenise=False)
        two = client.generate([1, 2], detokenise=False)
        for generation in (one, two):
            await generation.read()
        client.fail_all(RequestFailed("the end", 503))
        for generation, prompt_tokens in ((one, 1), (two, 2)):
            with pytest.raises(RequestFailed) as caught:
                await generation.read()
            assert caught.value.partial is not None
            assert caught.value.partial.usage == Usage(prompt_tokens, 0, 1)


async def test_repeated_tokens_are_dropped(scheduler: FakeScheduler) -> None:
    async def behave(request: FakeRequest) -> None:
        request.accept()
        request.tokens([1, 2, 3])
        request.tokens([2, 3, 4], first_index=1)
        request.tokens([1, 2], first_index=0)
        request.tokens([5], first_index=4)
        request.finish(EndReason.LENGTH)

    scheduler.behaviour = behave
    async with AsyncClient(scheduler.endpoint) as client:
        result = await client.complete([1], max_tokens=5, detokenise=False)
    assert result.token_ids == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("ids", "first_index", "problem"),
    [([3], 2, "tokens 1 to 1 were lost"), ([2] * 99, 1, "more than 16 tokens came")],
)
async def test_lost_or_excess_tokens_fail_the_request(
    scheduler: FakeScheduler, ids: list[int], first_index: int, problem: str
) -> None:
    async def behave(request: FakeRequest) -> None:
        request.accept()
        request.tokens([1])
        request.tokens(ids, first_index)

    scheduler.behaviour = behave
    async with AsyncClient(scheduler.endpoint) as client:
        with pytest.raises(RequestFailed, match=problem):
            await client.complete([1], max_tokens=16, detokenise=False)
        await until_cancelled(scheduler.requests[0])


async def test_a_scheduler_that_dies_fails_all_at_once(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer_and_hang([1])
    lost: list[str] = []

    async def read() -> None:
        with pytest.raises(ServerLost, match="the connection ended"):
            await client.complete([1], max_tokens=9)
        lost.append("request")

    async with AsyncClient(scheduler.endpoint) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            nursery.start_soon(read)
            await trio.sleep(0.1)
            scheduler.close()
            with trio.fail_after(2):
                reason = await client.wait_lost()
        assert scheduler.endpoint in str(reason)
        with pytest.raises(ServerLost):
            await client.status()
        with pytest.raises(ServerLost):
            await client.complete([1])
    assert lost == ["request", "request"]


async def test_a_silent_scheduler_is_lost(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = ignore
    scheduler.pings = False
    async with AsyncClient(scheduler.endpoint, silence_ms_max=200) as client:
        began = trio.current_time()
        with pytest.raises(ServerLost, match=r"nothing came from it for 0\.2 s"):
            await client.complete([1])
        assert 0.2 <= trio.current_time() - began < 2


async def test_a_question_without_an_answer_is_silence_too(scheduler: FakeScheduler) -> None:
    scheduler.answers_questions = False
    async with AsyncClient(scheduler.endpoint, silence_ms_max=200) as client:
        with pytest.raises(ServerLost, match="nothing came"):
            await client.status()


async def test_pings_keep_a_waiting_request_alive(scheduler: FakeScheduler) -> None:
    async def behave(request: FakeRequest) -> None:
        request.accept()
        await trio.sleep(0.8)
        request.tokens([1])
        request.finish(EndReason.LENGTH)

    scheduler.behaviour = behave
    async with AsyncClient(scheduler.endpoint, silence_ms_max=500) as client:
        assert (await client.complete([1], max_tokens=1)).token_ids == (1,)


async def test_silence_is_no_loss_when_nothing_is_due(scheduler: FakeScheduler) -> None:
    async with AsyncClient(scheduler.endpoint, silence_ms_max=100) as client:
        await client.complete([1], max_tokens=1)
        await trio.sleep(0.3)
        assert (await client.status()).ready


async def test_frames_that_cannot_be_read_end_the_connection(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = hang
    async with AsyncClient(scheduler.endpoint) as client, trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(ServerLost, match="what cannot be read"):
                await client.complete([1])

        nursery.start_soon(read)
        await trio.sleep(0.05)
        scheduler.send_raw(b"\x93garbage")


async def test_messages_about_nothing_of_ours_are_ignored(scheduler: FakeScheduler) -> None:
    scheduler.behaviour = answer([1], gap_s=0.05)
    usage = Usage(1, 0, 1)
    async with AsyncClient(scheduler.endpoint) as client:
        await client.status()
        stream, one = pack_ids([99]), pack_ids([1])
        for message in (
            Ping("another epoch"),
            Finished(StreamId(99), EndReason.LENGTH, usage, "", 200),
            NewTokens(stream, one, one, one),
            Refused(RequestId("99"), 400, "code", "text"),
            Card(None),
        ):
            scheduler.send_raw(encode(message))
        result = await client.complete([1], max_tokens=1, detokenise=False)
    assert result.token_ids == (1,)


async def test_lists_of_tokens_that_do_not_fit_end_the_connection(
    scheduler: FakeScheduler,
) -> None:
    async def behave(request: FakeRequest) -> None:
        request.accept()
        stream, two = pack_ids([request.stream]), pack_ids([2])
        request.send(NewTokens(stream, pack_ids([0]), two, pack_ids([1])))

    scheduler.behaviour = behave
    async with AsyncClient(scheduler.endpoint) as client:
        with pytest.raises(ServerLost, match="do not fit together"):
            await client.complete([1], detokenise=False)


async def test_what_the_scheduler_cannot_read_fails_what_it_has_not_answered(
    scheduler: FakeScheduler,
) -> None:
    async with AsyncClient(scheduler.endpoint) as client:
        scheduler.behaviour = hang
        running = client.generate([1])
        await running.start()
        with pytest.raises(RequestFailed, match=r"cannot read what was sent: .*max_tokens|str"):
            await client.complete([1], max_tokens="many", detokenise=False)  # type: ignore[arg-type]
        scheduler.behaviour = answer([1])
        assert (await client.complete([1], max_tokens=1)).token_ids == (1,)
        assert not scheduler.requests[0].cancels


async def test_requests_wait_for_a_scheduler_that_reads_slowly(
    scheduler: FakeScheduler,
) -> None:
    """More than its socket takes, so that the rest is kept here."""
    prompt = [1] * 50_000
    lengths: list[int] = []

    async def ask() -> None:
        result = await client.complete(prompt, max_tokens=1, detokenise=False)
        lengths.append(len(result.token_ids))

    async with AsyncClient(scheduler.endpoint) as client:
        scheduler.reads = trio.Event()
        await client.status()  # The last that it reads.
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(ask)
            await trio.sleep(0.2)
            assert not lengths
            scheduler.reads.set()
    assert lengths == [1] * 300
    assert {len(request.prompt) for request in scheduler.requests} == {len(prompt)}


async def test_too_many_requests_that_are_not_taken_are_refused(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.clients.unsent.FRAME_COUNT_MAX", 5)
    refused: list[int] = []

    async def ask() -> None:
        try:
            await client.complete([1] * 50_000, max_tokens=1, detokenise=False)
        except RequestRefused as error:
            refused.append(error.status)

    async with AsyncClient(scheduler.endpoint) as client:
        scheduler.reads = trio.Event()
        await client.status()  # The last that it reads.
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(ask)
            await trio.sleep(0.2)
            scheduler.reads.set()
    assert 100 < len(refused) < 300
    assert set(refused) == {429}
    assert len(scheduler.requests) == 300 - len(refused)


async def test_no_scheduler_is_told_with_the_endpoint(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/no.sock"
    began = trio.current_time()
    with pytest.raises(ConnectFailed, match=endpoint):
        async with AsyncClient(endpoint, connect_ms_max=100):
            pass
    assert trio.current_time() - began < 2


@pytest.mark.parametrize("endpoint", ["nonsense", "ipc://" + "x" * 200, "tcp://localhost"])
async def test_a_bad_endpoint_is_told(endpoint: str) -> None:
    with pytest.raises(ConnectFailed, match=r"no endpoint|bytes"):
        async with AsyncClient(endpoint):
            pass


async def test_the_endpoint_may_come_from_the_environment(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEGATE_ENDPOINT", scheduler.endpoint)
    async with AsyncClient() as client:
        assert (await client.status()).ready


async def test_the_default_endpoint_is_in_the_private_folder(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_folder))
    with pytest.raises(ConnectFailed, match=f"{socket_folder}/tidegate/clients.sock"):
        async with AsyncClient(connect_ms_max=50):
            pass


async def test_a_default_folder_that_others_may_enter_is_told(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TIDEGATE_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_folder))
    (socket_folder / "tidegate").mkdir(mode=0o755)
    with pytest.raises(ConnectFailed, match="open to other users"):
        async with AsyncClient():
            pass


def test_the_library_is_light() -> None:
    """Who reads ids needs neither the tokenizer's package nor the template's."""
    code = (
        "import sys, tidegate.clients.library\n"
        "print([m for m in ('torch', 'tokenizers', 'jinja2', 'anycorn') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert shown.stdout == b"[]\n"


async def test_many_streams_at_once_get_their_own_tokens(scheduler: FakeScheduler) -> None:
    async def behave(request: FakeRequest) -> None:
        request.accept()
        for index in range(request.max_tokens):
            await trio.lowlevel.checkpoint()
            request.tokens([request.prompt[0] * 100 + index])
        request.finish(EndReason.LENGTH)

    scheduler.behaviour = behave
    results: dict[int, tuple[int, ...]] = {}

    async def ask(number: int) -> None:
        result = await client.complete([number], max_tokens=20, detokenise=False)
        results[number] = result.token_ids

    async with AsyncClient(scheduler.endpoint) as client, trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(ask, number)
    assert results == {n: tuple(range(n * 100, n * 100 + 20)) for n in range(100)}
