"""README.md and docs/: each command and example is run as a reader would type it, or says where it would be."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from pannier.cli.main import cli
from pannier.v1 import status_pb2
from support.processes.cli import pannier
from support.processes.daemons import clean_environment
from support.processes.processes import Process
from support.processes.ranks import start_ranks
from support.processes.stretch import BOUND_S

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
ROOTS = ("/tmp/checkpoints", "gs://bucket/run")
"""Roots of the examples."""
OTHERS = {"cli.md": "test_command_line.py", "runbook.md": "deploy/test_monitoring.py"}
"""Pages whose commands have tests of their own."""
PROMPT = re.compile(r"^([\w ]*)\$ (.*?)(?:  +#.*)?$", re.MULTILINE)
ELSEWHERE = {
    r"make [\w-]+": "unit/test_packaging.py, .ci/run",
    r"make bench.*|.*-m tests\.bench\..*": "unit/test_bench.py",
    r"python3 -m venv .*|pip install .*": "unit/test_packaging.py",
    r"torchrun .* train\.py": "the first checkpoint, below",
    r"PJRT_DEVICE=.*": "xla/test_tpu_page.py",
}


@dataclass(frozen=True)
class Command:
    page: str
    place: str
    """Where it is typed: empty for here."""
    line: str


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(
        rf"^ *```{language}\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE
    )
    return [str(block) for block in found]


def commands() -> Iterator[Command]:
    for page in PAGES:
        for block in blocks(page, "console") if page.name not in OTHERS else []:
            for place, line in PROMPT.findall(block):
                yield Command(page.name, place, line)


def put(text: str, root: Path) -> str:
    """With the examples' roots replaced by one that is there."""
    for example in ROOTS:
        text = text.replace(example, str(root))
    return text


def runs_elsewhere(line: str) -> bool:
    return any(re.fullmatch(pattern, line) for pattern in ELSEWHERE)


def test_a_command_is_run_here_or_elsewhere() -> None:
    found = list(commands())
    assert {command.page for command in found} >= {"README.md", "operations.md", "retention.md"}
    for command in found:
        if not command.place and not command.line.startswith("pannier "):
            assert runs_elsewhere(command.line), command


def test_the_flags_of_commands_that_need_several_hosts_are_there() -> None:
    assert isinstance(cli, click.Group)
    context = click.Context(cli)
    seen = 0
    for command in commands():
        if command.place.endswith(("host", "hosts", "coordinator")) and "pannier " in command.line:
            words = shlex.split(command.line)
            name = words[words.index("pannier") + 1]
            called = cli.get_command(context, name)
            assert called is not None, command
            known = {flag for option in called.params for flag in option.opts}
            assert {word for word in words if word.startswith("--")} <= known, command
            seen += 1
    assert seen >= 2


def test_the_methods_that_grpcurl_calls_are_there() -> None:
    service = status_pb2.DESCRIPTOR.services_by_name["Status"]
    seen = 0
    for command in commands():
        if command.place == "grpcurl":
            called, _, method = shlex.split(command.line)[-1].rpartition("/")
            known = called == "grpc.health.v1.Health" or method in service.methods_by_name
            assert known or method == service.full_name, command
            seen += 1
    assert seen >= 4


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            name, _, anchor = target.partition("#")
            linked = page.parent / name if name else page
            assert linked.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
                assert anchor in {anchor_of(heading) for heading in headings}, (
                    f"{page.name}: {target}"
                )


def anchor_of(heading: str) -> str:
    """As the forges make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def trained(root: Path, settings: dict[str, str], *, torchrun: bool) -> str:
    """What the README's example prints."""
    (script,) = (block for block in blocks(PAGES[0], "python") if block.startswith("# train.py"))
    with start_ranks(put(script, root), 2, settings, torchrun=torchrun) as ranks:
        done = ranks.wait(2 * BOUND_S).check()
    return "".join(done.outputs)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_first_checkpoint_and_every_command(tmp_path: Path, embedded: Path) -> None:
    settings = {name: os.environ[name] for name in ("PANNIER_RUNTIME_DIR", "PANNIER_SPOOL")}
    settings["PANNIER_JOB"] = "llama"
    root = tmp_path / "checkpoints"
    first = trained(root, settings, torchrun=True)
    shown = re.findall(r"^pannier: saved .*", PAGES[0].read_text(), re.MULTILINE)
    printed = re.findall(r"pannier: saved .*", first)
    assert [without_figures(put(line, root)) for line in shown] == [*map(without_figures, printed)]
    assert "resumes" not in first
    assert "resumes after step 30" in trained(root, settings, torchrun=False)
    for command in commands():
        if command.place or not command.line.startswith("pannier "):
            continue
        words = shlex.split(put(command.line, root))[1:]
        done = pannier(*words, env=settings)
        assert done.code == 0, f"{command}\n{done}"


def without_figures(text: str) -> str:
    return re.sub(r"\d[\d.]*(?: (?:[KMGT]iB|B|ms|s|min(?: \d+ s)?)\b)?", "N", text)


FRAGMENTS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pannier import client

root, step = sys.argv[1], 0
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
state = {"training": {"model": model.state_dict()}}
handle = client.async_save(state, checkpoint_id=f"{root}/step-0")
handle.result()
for fragment in sys.argv[2:]:
    step += 1
    if "SIGTERM" in fragment:
        # The notice comes before its step.
        fragment = fragment.replace("stop =", "signal.raise_signal(signal.SIGTERM); stop =")
    if "all_reduce" in fragment:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        exec(compile(fragment, f"fragment {step}", "exec"))
    except SystemExit as preempted:
        assert preempted.code == 143
    client.wait_all()
    if dist.is_initialized():
        dist.destroy_process_group()
    print("passed", step, flush=True)
"""


def test_every_fragment(tmp_path: Path, embedded: Path) -> None:
    """Those of the training loop, in one process after another."""
    pages = [REPOSITORY / "README.md", REPOSITORY / "docs/guide.md"]
    root = tmp_path / "root"
    fragments = [
        put(each, root)
        for page in pages
        for each in blocks(page, "python")
        if not each.startswith("# train.py")
    ]
    assert len(fragments) >= 8
    process = Process(
        "fragments",
        [sys.executable, "-W", "ignore", "-c", FRAGMENTS, str(root), *fragments],
        environment=clean_environment(
            {name: os.environ[name] for name in ("PANNIER_RUNTIME_DIR", "PANNIER_SPOOL")}
        ),
        log=tmp_path / "fragments.log",
    )
    assert process.wait(2 * BOUND_S) == 0, process.log()
    assert f"passed {len(fragments)}" in process.log()
    (preempted,) = (number for number, each in enumerate(fragments, 1) if "SIGTERM" in each)
    assert (root / f"step-{preempted}" / ".metadata").exists()
