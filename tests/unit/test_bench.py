"""The bench still runs: its parts, one small measurement, and the table of docs/benchmarks.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> str:
    """Standard output of a module of the bench."""
    command = [sys.executable, "-W", "ignore", "-m", f"tests.bench.{module}", *arguments]
    finished = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_every_part_is_planned() -> None:
    parts = {line.split()[0] for line in run("run", "--list").splitlines()}
    assert parts >= {
        "blocking",
        "durable",
        "first_save",
        "memory",
        "peers",
        "recovery",
        "replicas",
        "restoring",
        "steps",
        "upload_cores",
        "uploading",
    }


@pytest.mark.extended
def test_a_part_prints_its_rows() -> None:
    output = run("blocking", "--json", "--bytes", "1M", "--tensors", "10", "--saves", "1")
    answer = json.loads(output.splitlines()[-1])
    assert "blocking time of `async_save`" in answer["rows"][0]["what"]
    assert len(answer["figures"]["called_s"]) == 1


def test_the_simulated_ranks_follow_the_protocol() -> None:
    size = ("--ranks", "4", "--replicas", "1", "--tensors", "2", "--saves", "1")
    output = run("planning", "--json", *size, "--peer-ranks", "0")
    answer = json.loads(output.splitlines()[-1])
    assert answer["figures"]["planning"][0]["steady_s"] > 0


def test_the_table_replaces_the_one_in_the_docs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    from tests.bench import report
    from tests.bench.parts import Row

    page = tmp_path / "benchmarks.md"
    page.write_text((REPOSITORY / "docs/benchmarks.md").read_text())
    for result in ("1.2 ×", "1.1 ×"):
        text = report.markdown(report.machine(), [Row("a | b", "≤ 1.1 ×", result, True)])
        report.put_in(page, text)
    written = page.read_text()
    assert written.count(report.BEGIN) == written.count(report.END) == 1
    assert "| a \\| b | ≤ 1.1 × | 1.1 × | met |" in written
    assert "1.2 × | met" not in written
