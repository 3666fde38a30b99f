"""Hosts as Linux network namespaces on one switch, so that a cut is a real cut.

Needs root and ``ip``. The test's own process is a host, too. All is gone with the context,
also the interface that it puts into the test's own namespace.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

import psutil
import pytest

HERE = "here"
"""The host that the test itself runs on."""
_PREFIX = "pannier-test-"
"""Of the namespaces' names; the process that made them follows."""


def unavailable() -> str:
    """Why this machine can't do it; empty when it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` command"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"{_PREFIX}{os.getpid()}-try"
    try:
        _ip("netns", "add", name)
    except RuntimeError as error:
        return f"no network namespace can be made: {error}"
    try:
        _ip("-n", name, "link", "add", "end0", "type", "veth", "peer", "name", "end1")
        _ip("-n", name, "link", "add", "switch", "type", "bridge")
    except RuntimeError as error:
        return f"no veth link or bridge can be made: {error}"
    finally:
        _ip("netns", "del", name)
    return ""


@contextmanager
def network_or_skip(*hosts: str) -> Iterator["Network"]:
    """A network of these hosts; skips the test where there can be none."""
    if why := unavailable():
        pytest.skip(f"no hosts on this machine: {why}")
    with Network(*hosts) as made:
        yield made


class Network:
    """``with Network("node", "coordinator") as network``: those hosts and the test's own."""

    def __init__(self, *hosts: str) -> None:
        self._hosts = (HERE, *hosts)
        self._stack = ExitStack()
        """Undoes what was done so far."""
        self._subnet = f"10.213.{os.getpid() % 250}"
        self._switch = self.space("switch")

    def address(self, host: str) -> str:
        """The host's IPv4 address."""
        return f"{self._subnet}.{self._hosts.index(host) + 1}"

    def prefix(self, host: str) -> Sequence[str]:
        """What comes before a command so that it runs on the host."""
        return () if host == HERE else ("ip", "netns", "exec", self.space(host))

    @staticmethod
    def space(host: str) -> str:
        """Name of the network namespace of a host other than the test's own."""
        return f"{_PREFIX}{os.getpid()}-{host}"

    def cut(self, host: str) -> None:
        """Drops all packets from and to the host, without errors."""
        _ip("-n", self._switch, "link", "set", self._port(host), "down")

    def mend(self, host: str) -> None:
        _ip("-n", self._switch, "link", "set", self._port(host), "up")

    def slow(self, host: str, rate: str) -> None:
        """What goes to the host passes at this rate (``tc``'s words), with a queue before it."""
        _run(
            *("ip", "netns", "exec", self._switch, "tc", "qdisc", "replace", "dev"),
            *(self._port(host), "root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"),
        )

    def __enter__(self) -> "Network":
        _remove_orphans()
        try:
            self._add(self._switch)
            _ip("-n", self._switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "switch", "up")
            for host in self._hosts:
                self._connect(host)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _connect(self, host: str) -> None:
        port = self._port(host)
        # Interfaces of a namespace end with it, and so does the other end of a pair.
        own = f"pn{os.getpid()}"
        inside: tuple[str, ...] = ()
        if host == HERE:
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", own)
            _ip("-n", self._switch, "link", "set", own, "netns", str(os.getpid()))
            self._stack.callback(_ip, "link", "del", own)
        else:
            space = self.space(host)
            self._add(space)
            inside = ("-n", space)
            _ip(
                *("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", own),
                *("netns", space),
            )
            _ip(*inside, "link", "set", "lo", "up")
        _ip(*inside, "address", "add", f"{self.address(host)}/24", "dev", own)
        _ip(*inside, "link", "set", own, "up")
        _ip("-n", self._switch, "link", "set", port, "master", "switch")
        self.mend(host)

    def _add(self, space: str) -> None:
        _ip("netns", "add", space)
        self._stack.callback(_ip, "netns", "del", space)

    def _port(self, host: str) -> str:
        return f"port{self._hosts.index(host)}"


def _remove_orphans() -> None:
    """What runs left behind that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        pid = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and not psutil.pid_exists(int(pid)):
            _ip("netns", "del", name)


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
