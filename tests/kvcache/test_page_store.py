"""The page store: where its bytes lie, how others reach them, and poison."""

import gc
import mmap
import os

import pytest
import torch

from tidegate.kvcache.layout import All, Group, Layout, TensorSpec, Tokens, Window
from tidegate.kvcache.page_store import PageStore

FULL = Group(
    name="full",
    reach=All(),
    page_tokens=Tokens(4),
    tensors=(
        TensorSpec("keys.0", 0, (2, 8), "bfloat16"),
        TensorSpec("values.0", 0, (2, 6), "bfloat16"),
        TensorSpec("entries.0", 0, (8,), "float32", tokens_per_entry=2),
    ),
)
WINDOW = Group(
    name="window",
    reach=Window(Tokens(8)),
    page_tokens=Tokens(2),
    tensors=(TensorSpec("keys.1", 1, (1, 4), "float32"),),
)
LAYOUT = Layout((FULL, WINDOW), True)


def test_each_tensor_is_a_view_of_its_pages_and_slots() -> None:
    store = PageStore(LAYOUT, [5, 3])
    assert store.tensor(0, 0).shape == (5, 4, 2, 8)
    assert store.tensor(0, 1).shape == (5, 4, 2, 6)
    assert store.tensor(0, 2).shape == (5, 2, 8)
    assert store.tensor(1, 0).shape == (3, 2, 1, 4)
    assert store.tensor(0, 0).dtype is torch.bfloat16
    assert store.tensor(0, 2).dtype is torch.float32


def test_a_new_store_holds_zeros() -> None:
    store = PageStore(LAYOUT, [5, 3])
    assert store.tensor(0, 1).eq(0).all()
    assert store.tensor(1, 0).eq(0).all()


def test_every_tensor_keeps_what_is_written_to_it_and_to_no_other() -> None:
    store = PageStore(LAYOUT, [5, 3])
    places = [(0, 0), (0, 1), (0, 2), (1, 0)]
    for value, place in enumerate(places, 1):
        store.tensor(*place).fill_(value)
    for value, place in enumerate(places, 1):
        assert store.tensor(*place).eq(value).all()


def test_a_page_is_where_the_geometry_says_with_its_tensors_in_order() -> None:
    store = PageStore(LAYOUT, [5, 3])
    page = torch.arange(16, dtype=torch.float32).view(2, 8)
    store.tensor(0, 2)[3] = page
    start = store.geometry.page_offset(0, 3)
    end = start + FULL.page_bytes
    assert bytes(store.buffer[end - 64 : end]) == page.numpy().tobytes()
    assert not any(store.buffer[: end - 64])
    assert not any(store.buffer[end:])


def test_another_process_reaches_the_bytes_by_the_handle() -> None:
    store = PageStore(LAYOUT, [5, 3])
    store.tensor(1, 0)[2] = 7.0
    handle = store.handle()
    assert handle.transport == "shared_memory"
    assert handle.page_counts == (5, 3)
    assert handle.byte_count == store.geometry.byte_count
    pid, fd = handle.address.split(":")
    peer_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    with mmap.mmap(peer_fd, handle.byte_count, prot=mmap.PROT_READ) as peer:
        start = store.geometry.page_offset(1, 2)
        assert (
            peer[start : start + WINDOW.page_bytes] == torch.full((8,), 7.0).numpy().tobytes()
        )
    os.close(peer_fd)


def test_bytes_copied_into_the_buffer_appear_in_the_tensors() -> None:
    source, target = PageStore(LAYOUT, [5, 3]), PageStore(LAYOUT, [2, 1])
    for index in range(3):
        source.tensor(0, index)[4] = index + 1.0
    first, second = source.geometry.page_offset(0, 4), target.geometry.page_offset(0, 1)
    size = FULL.page_bytes
    target.buffer[second : second + size] = source.buffer[first : first + size]
    for index in range(3):
        assert target.tensor(0, index)[1].eq(index + 1.0).all()
        assert target.tensor(0, index)[0].eq(0).all()


def test_poison_fills_all_of_the_given_pages_and_nothing_else() -> None:
    store = PageStore(LAYOUT, [5, 3])
    store.poison(0, [1, 4])
    for index in range(3):
        nan = store.tensor(0, index).isnan().flatten(1)
        assert all(nan[page].all() for page in (1, 4))
        assert not any(nan[page].any() for page in (0, 2, 3))
    assert not store.tensor(1, 0).isnan().any()


def test_a_group_may_have_no_pages() -> None:
    store = PageStore(LAYOUT, [0, 0])
    assert store.tensor(0, 0).shape == (0, 4, 2, 8)
    store.close()


def test_close_gives_the_descriptor_back_and_may_be_repeated() -> None:
    store = PageStore(LAYOUT, [5, 3])
    pid, fd = store.handle().address.split(":")
    store.close()
    store.close()
    assert not os.path.exists(f"/proc/{pid}/fd/{fd}")
    assert store.handle().transport == "none"
    with pytest.raises(ValueError, match="no buffer"):
        _ = store.buffer


def test_a_store_that_is_dropped_gives_the_descriptor_back() -> None:
    store = PageStore(LAYOUT, [5, 3])
    descriptor = int(store.handle().address.split(":")[1])
    os.fstat(descriptor)
    del store
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_views_outlive_close() -> None:
    store = PageStore(LAYOUT, [5, 3])
    view = store.tensor(1, 0)
    view.fill_(3.0)
    store.close()
    assert view.eq(3.0).all()


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="device is meta: it must be cpu or cuda"):
        PageStore(LAYOUT, [1, 1], "meta")


@pytest.mark.cuda
def test_a_gpus_pool_starts_zeroed_takes_poison_and_has_no_address() -> None:
    store = PageStore(LAYOUT, [5, 3], "cuda")
    assert store.tensor(0, 2).eq(0).all()
    store.poison(1, [2])
    assert store.tensor(1, 0)[2].isnan().all()
    assert not store.tensor(1, 0)[:2].isnan().any()
    assert store.handle().transport == "none"
    with pytest.raises(ValueError, match="no buffer"):
        _ = store.buffer
