"""`Monitor`: a lost connection is told at once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from tidegate.ipc.zmq_context import open_context
from tidegate.ipc.zmq_monitor import Monitor
from tidegate.ipc.zmq_trio import Socket

SERVER = """
import sys, time, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.bind(sys.argv[1])
print(router.get(zmq.LAST_ENDPOINT).decode(), flush=True)
time.sleep(60)
"""


def start_server(endpoint: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVER, endpoint]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
async def test_a_killed_server_is_noticed_at_once(transport: str, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/server" if transport == "ipc" else "tcp://127.0.0.1:*"
    with start_server(endpoint) as server, open_context() as context, trio.fail_after(20):
        assert server.stdout is not None
        try:
            address = (await trio.to_thread.run_sync(server.stdout.readline)).strip()
            async with Socket(context, zmq.DEALER) as socket, Monitor(socket) as monitor:
                socket.connect(address)
                await monitor.wait_connected()
                with trio.move_on_after(0.05) as scope:
                    await monitor.wait_disconnected()
                assert scope.cancelled_caught
                server.send_signal(signal.SIGKILL)
                with trio.fail_after(1):
                    await monitor.wait_disconnected()
        finally:
            server.kill()


async def test_each_loss_is_told_to_every_waiting_task(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/server"
    told: list[str] = []

    async def tell(name: str, monitor: Monitor) -> None:
        await monitor.wait_disconnected()
        told.append(name)

    with open_context() as context, trio.fail_after(20):
        async with (
            Socket(context, zmq.DEALER, reconnect_ivl=10) as socket,
            Monitor(socket) as monitor,
        ):
            socket.connect(endpoint)
            for _ in range(2):
                async with Socket(context, zmq.ROUTER) as server:
                    server.bind(endpoint)
                    await monitor.wait_connected()
                    await monitor.wait_connected()
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(tell, "a", monitor)
                        nursery.start_soon(tell, "b", monitor)
                        await trio.testing.wait_all_tasks_blocked()
                        server.close()
                assert sorted(told) == ["a", "b"]
                told.clear()
                await monitor.wait_disconnected()


async def test_a_loss_before_the_call_is_told_at_the_call(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/server"
    with open_context() as context, trio.fail_after(20):
        async with Socket(context, zmq.DEALER) as socket, Monitor(socket) as monitor:
            socket.connect(endpoint)
            async with Socket(context, zmq.ROUTER) as server:
                server.bind(endpoint)
                await socket.send(b"x")
                await server.recv_multipart()
            await trio.sleep(0.1)
            await monitor.wait_disconnected()


async def test_closing_wakes_who_waits(tmp_path: Path) -> None:
    with open_context() as context, trio.fail_after(20):
        async with Socket(context, zmq.DEALER) as socket:
            monitor = Monitor(socket)
            socket.connect(f"ipc://{tmp_path}/nobody")

            async def wait() -> None:
                with pytest.raises(trio.ClosedResourceError):
                    await monitor.wait_connected()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait)
                await trio.testing.wait_all_tasks_blocked()
                monitor.close()
