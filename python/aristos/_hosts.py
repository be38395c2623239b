"""The host of this process, and the address at which other hosts reach it."""

import os
import socket


def identity():
    """An identity that two processes share if their layers can find each other on one host. They do so by sockets with abstract names, which
    belong to a network namespace of a running kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read(), os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return os.uname().nodename


def address():
    """The name or address at which the processes of other hosts reach this one: `ARISTOS_ADDRESS`, or that of the interface through which this
    host reaches `MASTER_ADDR`."""
    if given := os.environ.get("ARISTOS_ADDRESS"):
        return given
    master, own = os.environ.get("MASTER_ADDR", "localhost"), None
    try:
        family, _, _, _, there = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Selects the interface without sending a packet.
            probe.connect(there)
            own = probe.getsockname()[0]
    except OSError:
        pass
    if own and not _is_loopback(own):
        return own
    # A host's own name often stands for a loopback address, but other hosts find the host by it.
    return os.uname().nodename if master == "localhost" or _is_loopback(master) else master


def _is_loopback(text):
    return text.startswith("127.") or text == "::1"
