"""`lorikeet adapters`: adapters, their versions, and the upload of a PEFT folder."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lorikeet_cli import mlx_adapters, progress
from lorikeet_cli.adapter_uploads import upload_version
from lorikeet_cli.config import secret_of
from lorikeet_cli.errors import CliError, Forbidden, Interrupted
from lorikeet_cli.mlx_adapters import CONFIG, MLX_TENSORS, TENSORS
from lorikeet_cli.output import Column, Row, moment, num_bytes, say, shown
from lorikeet_cli.session import LimitOption, Session, command, completer
from lorikeet_cli.uploads import Source

app = typer.Typer(help="Adapters and their versions.", no_args_is_help=True)

_CONVERT = "Run `lorikeet adapters convert {}`, and upload the folder that it writes."
_LFS_BEGIN = b"version https://git-lfs.github.com/"
MAX_CONFIG_BYTES = 1 << 20
MAX_REASONS = 20
#: Seconds between two requests for the state of a version that is being checked.
CHECK_INTERVAL_S = 0.5
_ENDED = ("ready", "rejected", "retired")

Name = Annotated[
    str, typer.Argument(help="The adapter's name.", autocompletion=completer("adapters"))
]
BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        help="For a new adapter, if there are several.",
        autocompletion=completer("base-models"),
    ),
]
WaitOption = Annotated[
    bool,
    typer.Option("--wait", help="Wait for the server's check; fail if it fails."),
]
TimeoutOption = Annotated[
    int, typer.Option("--timeout", min=1, help="The longest wait, in seconds.")
]
_COLUMNS: list[Column] = [
    ("NAME", "name"),
    ("BASE MODEL", "base_model"),
    ("LIVE VERSION", "live_version"),
    ("DESCRIPTION", "description"),
    ("SHUTDOWN", "shutdown_date"),
    ("MADE", moment("created_at")),
]
_VERSION_COLUMNS: list[Column] = [
    ("MODEL", "model"),
    ("STATUS", "status"),
    ("SOURCE", "source"),
    ("SIZE", num_bytes("num_bytes")),
    ("RANK", "max_rank"),
    ("DIGEST", lambda row: (row["digest"] or "-")[:12]),
    ("MADE", moment("created_at")),
]


@command(app, "list")
def list_(session: Session, limit: LimitOption = 20) -> None:
    """List the adapters, newest first."""
    empty = "No adapters. `lorikeet adapters upload FOLDER` makes one."
    session.print_list(session.items("adapters", limit=limit), _COLUMNS, empty)


@command(app, "get")
def get(
    session: Session,
    name: Name,
    version: Annotated[
        int | None, typer.Option("--version", min=1, help="This version of it.")
    ] = None,
) -> None:
    """Show an adapter, or one version of it."""
    if version is None:
        session.print_one(session.get("adapters", name), _COLUMNS)
        return
    row = session.get("adapters", name, "versions", version)
    session.print_one(row, [*_VERSION_COLUMNS, ("REASONS", lambda row: _reasons(row))])


@command(app, "versions")
def versions(session: Session, name: Name, limit: LimitOption = 20) -> None:
    """List an adapter's versions, newest first."""
    found = session.items("adapters", name, "versions", limit=limit)
    session.print_list(found, _VERSION_COLUMNS, "No versions.")


@command(app, "upload")
def upload(
    session: Session,
    folder: Annotated[Path, typer.Argument(help="A PEFT folder.")],
    name: Annotated[
        str | None, typer.Option("--name", help="The adapter. Default: the folder's name.")
    ] = None,
    base_model: BaseModelOption = None,
    accept_base_mismatch: Annotated[
        bool,
        typer.Option(
            "--accept-base-mismatch",
            help="Accept another base model's name in its config, if it is the same model under "
            "another "
            "name.",
        ),
    ] = False,
    wait: WaitOption = False,
    timeout: TimeoutOption = 600,
) -> None:
    """Upload a LoRA adapter as the next version of its name.

    A version counts when both files have arrived whole. If the upload is interrupted, run the same
    command again within a day: what has arrived is not sent again.
    """
    sources = read_folder(folder)
    adapter = name or folder.resolve().name
    try:
        version = upload_version(
            session,
            adapter,
            sources,
            base_model=base_model,
            accepts_base_mismatch=accept_base_mismatch,
        )
    except KeyboardInterrupt:
        raise Interrupted(
            "Interrupted: what has arrived is kept for a day. Run the same command again to resume."
        ) from None
    place = ("adapters", adapter, "versions", version["number"])
    if wait:
        version = _wait(session, place, timeout)
    session.print_one(version, _VERSION_COLUMNS)
    if version["status"] == "rejected":
        raise CliError(f"{version['model']} was rejected: {_reasons(version)}")
    if version["status"] == "ready":
        _check_digest(session, version, sources)


@app.command("convert")
def convert(
    folder: Annotated[Path, typer.Argument(help="A folder that mlx-lm wrote.")],
    to: Annotated[
        Path | None,
        typer.Option("--to", help="The new folder. Default: FOLDER with -peft at its end."),
    ] = None,
) -> None:
    """Convert an mlx-lm adapter, LoRA or DoRA, into a PEFT folder to upload.

    It needs no server. Prints the new folder.
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise CliError(
            f"{folder} is not a folder. Name the folder with {CONFIG} and {MLX_TENSORS}."
        )
    for name in (CONFIG, MLX_TENSORS):
        if not (folder / name).exists():
            raise CliError(f"{folder} is not a folder of mlx-lm: no {name} in it.")
        _refuse_pointer(folder / name)
    output = to or folder.with_name(f"{folder.name}-peft")
    made = mlx_adapters.convert(folder, read_config(folder / CONFIG), output)
    config = made.config
    say(
        f"Converted {len(made.tensors)} tensors: rank {config['r']}, lora_alpha "
        f"{config['lora_alpha']}, {', '.join(config['target_modules'][:8])}."
    )
    print(output)


@command(app, "import")
def import_(
    session: Session,
    name: Name,
    repository: Annotated[
        str | None, typer.Option("--repository", help="Of the server's Hub, as OWNER/NAME.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="A branch, a tag or a commit. Default: main.")
    ] = None,
    token_env: Annotated[
        str | None,
        typer.Option("--token-env", help="The environment variable that has the Hub's token."),
    ] = None,
    urls: Annotated[
        tuple[str, str] | None,
        typer.Option("--urls", help=f"Instead: https addresses of {CONFIG} and of {TENSORS}."),
    ] = None,
    base_model: BaseModelOption = None,
    wait: WaitOption = False,
) -> None:
    """Have the server fetch a LoRA adapter, from its Hub or from two addresses.

    The server continues when this command ends.
    """
    body = {
        "repository": repository,
        "revision": revision,
        "token": None if token_env is None else secret_of(token_env),
        "config_url": urls[0] if urls else None,
        "tensors_url": urls[1] if urls else None,
        "base_model": base_model,
    }
    given = {field: value for field, value in body.items() if value is not None}
    version = session.send("POST", "adapters", name, "import", body=given)
    if wait:
        version = _wait(session, ("adapters", name, "versions", version["number"]), 600)
    session.print_one(version, _VERSION_COLUMNS)
    if version["status"] == "rejected":
        raise CliError(f"{version['model']} was rejected: {_reasons(version)}")


def _wait(session: Session, place: tuple[str | int, ...], timeout_s: int) -> dict[str, Any]:
    give_up_at = time.monotonic() + timeout_s
    with progress.bar("checking", total=None) as bar:
        try:
            while True:
                version: dict[str, Any] = session.get(*place)
                if version["status"] in _ENDED:
                    return version
                bar.show(0, note=shown(version["status"]))
                if time.monotonic() > give_up_at:
                    break
                time.sleep(CHECK_INTERVAL_S)
        except KeyboardInterrupt:
            raise Interrupted(
                f"Interrupted: the upload is complete, and the server is still checking it."
                f"See `lorikeet adapters get {place[1]} --version {place[3]}`."
            ) from None
    raise CliError(
        f"{version['model']} is still {version['status']} after {timeout_s} s. See `lorikeet "
        f"adapters get {place[1]} --version {place[3]}`; the server's ingest worker may be away."
    )


def read_folder(folder: Path) -> dict[str, Source]:
    """Return an adapter folder's two files by name. Raises CliError if a file is missing."""
    if not folder.is_dir():
        raise CliError(f"{folder} is not a folder. Name the folder with {CONFIG} and {TENSORS}.")
    missing = [name for name in (CONFIG, TENSORS) if not (folder / name).exists()]
    if missing:
        raise CliError(
            f"{folder} is not an adapter folder: no {' and no '.join(missing)} in it. "
            f"{_hint(folder)}"
        )
    sources = {name: Source.of(folder / name) for name in (CONFIG, TENSORS)}
    for name in sources:
        _refuse_pointer(folder / name)
    config = read_config(folder / CONFIG)
    if not isinstance(config, dict) or "peft_type" not in config:
        if isinstance(config, dict) and "lora_parameters" in config:
            raise CliError(f"{folder} has an adapter of mlx-lm. {_CONVERT.format(folder)}")
        raise CliError(f"{folder / CONFIG} is not a PEFT configuration: it has no peft_type.")
    return sources


def read_config(path: Path) -> Any:
    """Return the parsed configuration; None if it is not JSON. Raises CliError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.") from error
    try:
        return json.loads(data) if len(data) <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError):
        return None


def _refuse_pointer(path: Path) -> None:
    """Raise CliError if a file is only a Git LFS pointer."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_BEGIN)) == _LFS_BEGIN
    except OSError as error:
        raise CliError(f"Cannot read {path}: {error.strerror}.") from error
    if is_pointer:
        raise CliError(f"{path} is a Git LFS pointer, not the file. Run `git lfs pull` there.")


def _hint(folder: Path) -> str:
    if (folder / MLX_TENSORS).exists():
        return f"It is mlx-lm's. {_CONVERT.format(folder)}"
    if (folder / "adapter_model.bin").exists():
        return "Its weights are a pickle: save them with save_pretrained(safe_serialization=True)."
    if (folder / "config.json").exists():
        return "It looks like a whole model; the LoRA adapter alone is what you upload."
    inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))[:3]
    if inside:
        return f"Did you mean {', '.join(str(folder / each) for each in inside)}?"
    return "PEFT's save_pretrained writes both."


def _reasons(version: Row) -> str:
    reasons = [f"{each['field']}: {each['message']}" for each in version["reasons"]]
    more = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
    return ("; ".join(reasons[:MAX_REASONS]) + more) or "-"


def _check_digest(session: Session, version: dict[str, Any], sources: dict[str, Source]) -> None:
    """Compare the server's digest of the version with that of the files here. Raises CliError."""
    base = session.get("adapters", version["adapter"])["base_model"]
    try:
        bases = session.client.pages(session.base_models_path(), limit=1000)["data"]
    except Forbidden:
        return  # an operator's key with narrow scopes
    revisions = [each["revision"] for each in bases if each["name"] == base]
    if not revisions or not version["digest"]:
        return
    identity = {
        "base_revision": revisions[0],
        "config": read_config(sources[CONFIG].path),
        "tensors_sha256": sources[TENSORS].sha256,
    }
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if hashlib.sha256(text.encode()).hexdigest() != version["digest"]:
        raise CliError(
            f"{version['model']} is ready, but is not what is in {sources[CONFIG].path.parent}: "
            "the digests differ. Upload it again."
        )
