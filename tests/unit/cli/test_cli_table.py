"""Tables fit the width that there is, and cut only what may be cut."""

import pytest
from rich.console import Console

from pannier.cli.table import Column, Fit, Table, shorten_path, shorten_start

PATH = "gs://bucket/a-long-directory/another-one/step-1000"


def lines(table: Table, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    out = [line.rstrip() for line in captured.get().splitlines()]
    assert all(len(line) <= width for line in out), out
    return out


def saves() -> Table:
    table = Table(
        Column("checkpoint", fit=Fit.PATH),
        Column("state"),
        Column("bytes", right=True),
        Column("job", drop=1),
        Column("attempt", drop=2),
        Column("kept for", drop=3),
    )
    table.add_row(PATH, "COMMITTED", "2.0 GiB", "llama", "i1-0123456789-s3", "")
    table.add_row("step-7", "UNDECIDED", "12.0 MiB", "", "i1-0123456789-s4", "")
    return table


def test_all_columns_with_any_content_are_shown_where_they_fit() -> None:
    head, first, second = lines(saves(), 200)
    assert head.split() == ["checkpoint", "state", "bytes", "job", "attempt"]
    assert first.split() == [PATH, "COMMITTED", "2.0", "GiB", "llama", "i1-0123456789-s3"]
    assert second.split() == ["step-7", "UNDECIDED", "12.0", "MiB", "i1-0123456789-s4"]


def test_a_path_loses_its_directories_before_a_column_is_left_out() -> None:
    head, first, _ = lines(saves(), 80)
    assert "attempt" in head
    assert first.split()[0] == "…/another-one/step-1000"


@pytest.mark.parametrize(("width", "left_out"), [(50, "attempt"), (38, "job, attempt")])
def test_the_least_used_columns_are_left_out_and_named(width: int, left_out: str) -> None:
    head, first, second, note = lines(saves(), width)
    assert note == f"-o wide shows also: {left_out}"
    assert not set(left_out.split(", ")) & set(head.split())
    assert "step-1000" in first
    assert "COMMITTED   2.0 GiB" in first
    assert "UNDECIDED  12.0 MiB" in second


def test_text_wraps_and_loses_nothing() -> None:
    table = Table(Column("host", fit=Fit.END), Column("problem", fit=Fit.TEXT))
    words = [f"word-{number}" for number in range(40)]
    table.add_row("node-with-a-name-that-is-long-0123456789", " ".join(words))
    _, first, *others = lines(table, 60)
    host, *rest = first.split()
    assert host.startswith("…")
    assert host.endswith("-0123456789")
    assert rest + " ".join(others).split() == words


def test_square_brackets_are_no_markup() -> None:
    table = Table(Column("checkpoint", fit=Fit.PATH))
    table.add_row("[red]run[/red]")
    assert lines(table, 80)[1] == "[red]run[/red]"


def test_a_table_without_rows_has_a_head() -> None:
    assert lines(Table(Column("state"), Column("job", drop=1)), 80) == ["state"]


def test_what_is_shortened_keeps_its_end() -> None:
    assert shorten_path("a/b/c", 5) == "a/b/c"
    assert shorten_path("long/b/c", 5) == "…/b/c"
    assert shorten_path("a/a-long-name", 5) == "a-long-name"
    assert shorten_start("node-12", 7) == "node-12"
    assert shorten_start("node-12", 4) == "…-12"
