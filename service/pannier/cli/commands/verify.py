"""``pannier verify``: compares a checkpoint's data files with what was committed."""

import asyncio
from typing import Any

import click
from rich.text import Text

from pannier.cli import output
from pannier.cli.bars import reading_bar
from pannier.cli.errors import NEGATIVE, OK
from pannier.cli.options import Location, output_options
from pannier.cli.storage import open_answering, store_options
from pannier.cli.table import Column, Fit, Table
from pannier.common.units import counted
from pannier.maintenance.verify import Finding, VerifyResult, verify


@click.command("verify")
@click.argument("checkpoint_id", type=Location())
@store_options
@output_options
def command(
    *, checkpoint_id: str, storage_options: dict[str, Any], wide: bool, as_json: bool
) -> None:
    """Re-read all data files of CHECKPOINT_ID and compare them with its receipts.

    Sizes and crc32c checksums are compared with those that each rank's sidecar
    confirmed, and .metadata with the COMMIT decision. Exit status 1 when anything
    differs or is missing, or when it isn't a checkpoint that Pannier committed.

    The JSON is a stable contract: "checkpoint", "attempt", "ok", and per object
    in "files": "name", "rank" (or null), "status" (ok, missing, size, checksum,
    malformed), "size", "expected_size", "crc32c" and "expected_crc32c" (8 hex
    digits); null where it isn't known.
    """
    result = asyncio.run(_verify(checkpoint_id, storage_options))
    if as_json:
        output.print_json(
            {
                "checkpoint": checkpoint_id,
                "attempt": result.attempt,
                "ok": result.ok,
                "files": [_fields(finding) for finding in result.findings],
            }
        )
    else:
        _print(checkpoint_id, result, wide=wide)
    click.get_current_context().exit(OK if result.ok else NEGATIVE)


async def _verify(checkpoint_id: str, options: dict[str, Any]) -> VerifyResult:
    async with open_answering(checkpoint_id, options) as store:
        with reading_bar() as bar:
            task = bar.add_task("", total=None)
            return await verify(
                store,
                progress=lambda count, total: bar.update(task, advance=count, total=total),
            )


def _print(checkpoint_id: str, result: VerifyResult, *, wide: bool) -> None:
    bad = [finding for finding in result.findings if finding.status != "ok"]
    total = sum(finding.size or 0 for finding in result.findings)
    if not bad:
        output.say(
            f"ok: {checkpoint_id}, attempt {result.attempt}: {counted(len(result.findings), 'object')}, "
            f"{output.size(total)}, all as committed"
        )
        return
    table = Table(
        Column("object", fit=Fit.TEXT),
        Column("rank", drop=1, right=True),
        Column("problem", fit=Fit.TEXT),
    )
    for finding in bad:
        rank = "" if finding.rank is None else str(finding.rank)
        table.add_row(finding.name, rank, Text(_problem(finding), style="red"))
    output.say(f"damaged: {checkpoint_id}, attempt {result.attempt}")
    output.show(table, wide=wide)


def _problem(finding: Finding) -> str:
    if finding.status == "size":
        return f"has {finding.size} bytes, should have {finding.expected_size}"
    if finding.status == "checksum":
        return f"crc32c is {_hex(finding.crc32c)}, should be {_hex(finding.expected_crc32c)}"
    return finding.status


def _hex(checksum: int | None) -> str | None:
    return None if checksum is None else f"{checksum:08x}"


def _fields(finding: Finding) -> dict[str, Any]:
    return {
        "name": finding.name,
        "rank": finding.rank,
        "status": finding.status,
        "size": finding.size,
        "expected_size": finding.expected_size,
        "crc32c": _hex(finding.crc32c),
        "expected_crc32c": _hex(finding.expected_crc32c),
    }
