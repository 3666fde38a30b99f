"""A container of :mod:`support.kubernetes.pods`, from within: a process of its own namespaces becomes the program.

``unshare --mount --pid --fork python -m support.kubernetes.container CONFIG``, as root. CONFIG is a JSON
file with what a container runtime would get: ``arguments``, ``environment``, ``user``, ``group``,
``groups``, ``capabilities``, ``mounts`` (source, target, read-only), ``read_only`` for the root, ``image`` (an
image's root file system, or None) or else ``visible`` (directories of this machine that stand for the image's),
``hosts`` (the text of /etc/hosts), ``root``, an empty directory. The program is PID 1 there, as it is in a container.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_LAST_CAPABILITY = 40
_NUMBERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "SYS_RESOURCE": 24}
_OF_ETC = ("passwd", "group", "ssl", "nsswitch.conf", "localtime", "ld.so.cache", "mime.types")


def main() -> None:
    config = json.loads(Path(sys.argv[1]).read_text())
    root = Path(config["root"])
    _mount("--make-rprivate", "/")
    # A checkout in /tmp, say, lies below a volume: it is shown there once that is mounted.
    targets = tuple(f"{target.rstrip('/')}/" for _, target, _ in config["mounts"])
    visible = [] if config["image"] else config["visible"]
    _mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(root))
    if config["image"]:
        root = _over(config["image"], root)
    else:
        for name in _OF_ETC:
            if Path("/etc", name).exists():
                _bind(f"/etc/{name}", root, f"/etc/{name}", read_only=True)
    for name in visible:
        if not name.startswith(targets):
            _show(name, root)
    (root / "etc/hosts").write_text(config["hosts"])
    for name in ("null", "zero", "urandom", "random"):
        _bind(f"/dev/{name}", root, f"/dev/{name}", read_only=False)
    for name, mode in (("tmp", 0o1777), ("run", 0o755), ("dev/shm", 0o1777), ("proc", 0o555)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    _mount("-t", "proc", "proc", str(root / "proc"))
    for source, target, read_only in config["mounts"]:
        _bind(source, root, target, read_only=read_only)
    for name in visible:
        if name.startswith(targets):
            _show(name, root)
    if config["read_only"]:
        _mount("-o", "remount,bind,ro", str(root))
    os.chroot(root)
    os.chdir("/tmp")
    _become(config)
    os.execvpe(config["arguments"][0], config["arguments"], config["environment"])


def _become(config: dict[str, Any]) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    kept = {_NUMBERS[name] for name in config["capabilities"]}
    for number in range(_LAST_CAPABILITY + 1):
        if number not in kept and prctl(_PR_CAPBSET_DROP, number, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"dropping capability {number}")
    os.setgroups(config["groups"])
    os.setresgid(*3 * (config["group"],))
    os.setresuid(*3 * (config["user"],))
    if prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "giving up new privileges")


def _over(image: str, top: Path) -> Path:
    """A root that is the image's: what is made in it for the mounts lies in ``top``."""
    for name in ("upper", "work", "root"):
        (top / name).mkdir()
    layers = f"lowerdir={image},upperdir={top}/upper,workdir={top}/work"
    _mount("-t", "overlay", "-o", layers, "overlay", str(top / "root"))
    return top / "root"


def _show(name: str, root: Path) -> None:
    """A directory of this machine, or a link to one, under its own name."""
    if Path(name).is_symlink():
        (root / name[1:]).symlink_to(os.readlink(name))
    else:
        _bind(name, root, name, read_only=True)


def _bind(source: str, root: Path, target: str, *, read_only: bool) -> None:
    place = root / target[1:]
    if Path(source).is_dir():
        place.mkdir(parents=True, exist_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    _mount("--bind", source, str(place))
    if read_only:
        _mount("-o", "remount,bind,ro", str(place))


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


if __name__ == "__main__":
    main()
