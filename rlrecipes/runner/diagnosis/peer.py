"""What runs on each machine while the network between them is tried. Sent there as text: the standard library alone.

    python3 -c "$(cat peer.py)" FIRST_PORT

prints its address and two ports, one below those that the kernel gives away and one of them; reads the same of all
machines, calls each, prints how that went, and answers others until its input ends.
"""

import json
import random
import socket
import sys
import threading
import time

TIMEOUT_S = 5.0
NUM_ROUNDS = 5


def find_address() -> str:
    """The address by which other machines call this one: of the interface to the outside, as Ray finds it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("8.8.8.8", 80))  # of a datagram socket: sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostbyname(socket.gethostname())


def listen(ports: "list[int]") -> socket.socket:
    """Listen at the first of some ports that is free."""
    for port in ports:
        listener = socket.socket()
        try:
            listener.bind(("", port))
        except OSError:
            listener.close()
            continue
        listener.listen(64)
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        return listener
    raise SystemExit("no port is free")


def answer(listener: socket.socket) -> None:
    """Send back what comes, to one caller after another."""
    while True:
        caller, _ = listener.accept()
        caller.settimeout(TIMEOUT_S)
        with caller:
            try:
                while word := caller.recv(1):
                    caller.sendall(word)
            except OSError:
                continue


def call(address: str, port: int) -> float:
    """Seconds that a byte takes there and back, the quickest of some."""
    with socket.create_connection((address, port), timeout=TIMEOUT_S) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(NUM_ROUNDS):
            begun = time.perf_counter()
            peer.sendall(b".")
            if not peer.recv(1):
                raise OSError("hung up")
            times.append(time.perf_counter() - begun)
    return min(times)


def try_machine(address: str, ports: "list[int]") -> "dict[str, object]":
    """How calling one machine at all of its ports went."""
    times, problems = [], []
    for port in ports:
        try:
            times.append(call(address, port))
        except OSError as error:
            problems.append(f"port {port} of {address}: {error}")
    return {"round_trip_s": min(times, default=None), "problems": problems}


def main() -> None:
    """Meet the others."""
    first = int(sys.argv[1])
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        ephemeral = int(file.read().split()[0])
    below = random.sample(range(first, ephemeral), k=min(64, max(0, ephemeral - first)))
    listeners = [listen([*below, 0]), listen([0])]
    ports = [listener.getsockname()[1] for listener in listeners]
    print(json.dumps({"address": find_address(), "ports": ports}), flush=True)
    others = json.loads(sys.stdin.readline())
    print(json.dumps({name: try_machine(*place) for name, place in others.items()}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
