"""Tiny models on one thread: two threads wait for one another longer than they compute."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
