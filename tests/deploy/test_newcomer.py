"""A newcomer on a bare Debian: from a clone to a resumed run by the README's text alone.

In: the root file system of ``make images``' base, which is Debian with its own Python, and wheels, most of them
fetched there, in place of a package index. There is no other network.
"""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.kubernetes.images import WHEELS, check_built, image
from support.kubernetes.manifests import REPOSITORY
from support.processes.daemons import clean_environment
from support.processes.processes import Process

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]
README = (REPOSITORY / "README.md").read_text()
USER = 1000


def typed() -> str:
    """What a newcomer types, in the README's order, as a script; the training is started twice."""
    (example,) = re.findall(r"^```python\n(# train\.py\n.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"^\$ (.*?)(?:  +#.*)?$", README, re.MULTILINE)
    install = [line for line in lines if line.startswith(("python3 -m venv", "pip install"))]
    run = [line for line in lines if line.startswith(("torchrun", "pannier"))]
    assert (len(install), len(run)) == (2, 3)
    assert run[0].startswith("torchrun")
    return "\n".join([*install, f"cat > train.py <<'END'\n{example}END", run[0], *run])


def test_from_a_clone_to_a_resumed_run(tmp_path: Path) -> None:
    check_built()
    clone = tmp_path / "pannier"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    subprocess.run(["chown", "--recursive", str(USER), str(clone)], check=True)
    (tmp_path / "root").mkdir()
    # The images have no use for it.
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
            *("--constraint", str(REPOSITORY / "requirements.lock")),
            *("--dest", str(tmp_path / "more"), "safetensors"),
        ],
        check=True,
    )
    config = {
        "arguments": ["bash", "-euxc", f"cd /home/pannier\n{typed()}"],
        "environment": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/home/pannier",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "/wheels /more",
        },
        "user": USER,
        "group": USER,
        "groups": [],
        "capabilities": [],
        "mounts": [
            (str(WHEELS), "/wheels", True),
            (str(tmp_path / "more"), "/more", True),
            (str(clone), "/home/pannier", False),
        ],
        "read_only": False,
        "image": str(image("base").root),
        "visible": [],
        "hosts": f"127.0.0.1 localhost {platform.node()}\n",
        "root": str(tmp_path / "root"),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    inside = f"ip link set lo up; exec {sys.executable} -m support.kubernetes.container $0"
    newcomer = Process(
        "newcomer",
        [
            *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"),
            *("sh", "-c", inside, str(tmp_path / "config.json")),
        ],
        environment=clean_environment(),
        log=tmp_path / "log",
        cwd=REPOSITORY / "tests",
    )
    try:
        assert newcomer.wait(500) == 0, newcomer.log()[-4000:]
    finally:
        newcomer.close()
    said = newcomer.log()
    assert said.count("resumes after step 30") == 4
    assert said.count("pannier: saved /tmp/checkpoints/step-") == 6
    assert re.search(r"^step-60 +committed", said, re.MULTILINE)
    assert "ok: /tmp/checkpoints/step-30" in said
