"""``pannier export``: a checkpoint's tensors as safetensors files, in a process of its own."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from typing import Any, Final

import click

from pannier.cli import output
from pannier.cli.bars import reading_bar
from pannier.cli.options import Location, Size, json_option, storage_options
from pannier.supervisor.processes import child_setup, ending
from pannier.wire import errors

_WORKER: Final = (sys.executable, "-m", "pannier.client.conversion.worker")
_PACKAGES: Final = ("torch", "numpy", "safetensors")


@click.command("export")
@click.argument("checkpoint_id", type=Location())
@click.argument("directory", type=click.Path())
@click.option(
    "--format",
    type=click.Choice(["safetensors"]),
    default="safetensors",
    show_default=True,
    help="What to write.",
)
@click.option(
    "--prefix",
    default="",
    metavar="TEXT",
    help="Take the keys that begin with this, and remove it from their names: model.",
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="NAME",
    help="Take tensors of this name, which may have shell wildcards, without the prefix; may be given "
    "several times.  [default: all]",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="NAME",
    help="Leave these out; may be given several times.",
)
@click.option(
    "--dtype",
    metavar="NAME",
    help="Cast floating-point tensors: bfloat16.  [default: as they are stored]",
)
@click.option(
    "--max-file-size",
    type=Size(),
    default="2GB",
    show_default=True,
    metavar="SIZE",
    help="Most bytes of tensors in a file; a larger tensor has a file of its own.",
)
@storage_options
@json_option
def command(
    *,
    checkpoint_id: str,
    directory: str,
    format: str,
    prefix: str,
    keys: tuple[str, ...],
    exclude: tuple[str, ...],
    dtype: str | None,
    max_file_size: int,
    storage_options: dict[str, Any],
    as_json: bool,
) -> None:
    """Write the tensors of CHECKPOINT_ID as safetensors files into DIRECTORY.

    Any DCP checkpoint will do, from any storage. DIRECTORY is local, and must not exist
    or be empty; it appears when all is written. Its files are those of Hugging Face's
    libraries: model-00001-of-00002.safetensors and so on, and an index of them. Other
    objects than tensors can't be exported: choose with --prefix, --key and --exclude.

    It needs pannier[torch,export] here, and memory for three times --max-file-size. Don't
    run it where training needs that.

    The JSON is a stable contract: "checkpoint", "directory", "files" (bytes by name),
    "tensors" (their number), "bytes" and "seconds".
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise errors.ConfigurationError(
            f"an export needs {', '.join(missing)}, not installed in {sys.prefix}: pip install "
            f"{' '.join(missing)} there, or run it where training does"
        )
    result = _run(
        {
            "checkpoint_id": checkpoint_id,
            "directory": directory,
            "format": format,
            "prefix": prefix,
            "keys": keys or None,
            "exclude": exclude,
            "dtype": dtype,
            "max_file_bytes": max_file_size,
            "storage_options": storage_options or None,
        }
    )
    files = result["files"]
    size = sum(files.values())
    if as_json:
        output.print_json(
            {
                "checkpoint": result["checkpoint_id"],
                "directory": result["directory"],
                "files": files,
                "tensors": result["tensors"],
                "bytes": size,
                "seconds": round(result["seconds"], 3),
            }
        )
        return
    output.say(
        f"exported {result['checkpoint_id']} to {result['directory']}: {result['tensors']} tensors in "
        f"{len(files) - 1} files, {output.size(size)}"
    )


def _run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Runs the worker, and shows how far it is; returns its result. Raises the error that it reports."""
    with (
        subprocess.Popen(
            _WORKER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # On this signal, the worker removes its half-written files.
            preexec_fn=child_setup(os.getpid(), signal.SIGTERM),
        ) as worker,
        reading_bar() as bar,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        task = bar.add_task("", total=None)
        report: dict[str, Any] = {}
        try:
            # By a pipe: other users can read command lines, and options may contain credentials.
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(arguments) + "\n")
                worker.stdin.flush()
            for line in worker.stdout:
                report = json.loads(line)
                if "progress" in report:
                    done, total = report["progress"]
                    bar.update(task, completed=done, total=total)
        except BaseException:
            worker.terminate()
            worker.wait()
            raise
    if "result" in report:
        result: dict[str, Any] = report["result"]
        return result
    if "error" in report:
        kind: type[errors.PannierError] = getattr(errors, report["type"])
        raise kind(report["error"])
    raise errors.PannierError(
        f"the export's process ended with {ending(worker.returncode)}, and nothing was written: if there "
        "was not enough memory, give a smaller --max-file-size"
    )
