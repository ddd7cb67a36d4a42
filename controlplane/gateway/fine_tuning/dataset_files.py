"""Files for training become rows that runs read, and versions of datasets.

The store copies the bytes itself; none of them passes through this process.
"""

from __future__ import annotations

from contract.process import line_reader
from contract.training import chat_rows
from contract.training.row_messages import Row, method_fault
from controlplane.errors import InvalidRequest, NotFound
from controlplane.files.models import File, Purpose
from controlplane.files.services import file_get
from controlplane.infra import storage
from controlplane.tenancy.scoping import current_tenant_id
from controlplane.training.datasets import contents, versions
from controlplane.training.datasets.contents import Rows
from controlplane.training.models import Dataset, dataset_key


def training_file_get(public_id: str, param: str) -> File:
    """Return the file for training with this id. Raises NotFound, InvalidRequest."""
    file = file_get(public_id, param=param)
    if file.purpose != Purpose.FINE_TUNE:
        raise InvalidRequest(
            f"The file has the purpose {file.purpose}: upload it with purpose "
            f"{Purpose.FINE_TUNE.value}.",
            param=param,
            code="invalid_file_purpose",
        )
    return file


@storage.answering()
def take_over(file: File, param: str) -> Rows:
    """Copy the file's bytes to where runs read theirs, within the tenant. -> the rows.

    The copy is removed when no run or dataset needs it any more. Rows were checked as the file was
    uploaded, and its bytes never change. Raises NotFound for a file that is just being deleted, and
    what `content_begin` raises.
    """
    tenant_id = current_tenant_id()
    assert file.tenant_id == tenant_id
    key = dataset_key(tenant_id, file.sha256)
    contents.content_begin(tenant_id, file.sha256, file.num_bytes)
    try:
        if storage.object_size(key) != file.num_bytes:
            storage.copy(file.key, key)
    except storage.ObjectMissing as error:
        raise NotFound("There is no such file.", param=param) from error
    assert file.num_rows is not None, "its purpose is fine-tuning"
    return Rows(sha256=file.sha256, num_bytes=file.num_bytes, num_rows=file.num_rows)


@storage.answering()
def method_check(rows: Rows, method: str, param: str) -> None:
    """Check that rows that were taken over are those of the method. Raises InvalidRequest.

    All rows are of the first one's kind.
    """
    lines = line_reader.lines(contents.pieces(rows.sha256), max_bytes=chat_rows.MAX_LINE_BYTES)
    first = next(chat_rows.read_rows(lines))
    fault = method_fault(first.kind, method) if isinstance(first, Row) else ""
    if fault:
        raise InvalidRequest(
            f"A row of the file {fault}.", param=param, code="rows_of_another_method"
        )


def dataset_from_file(*, name: str, file_id: str, appends: bool) -> Dataset:
    """Make a file's rows the next version of a dataset, which they replace or extend.

    The file is no longer needed afterwards. Raises what `training_file_get`, `take_over` and
    `versions.version_add` raise.
    """
    versions.name_check(name)
    rows = take_over(training_file_get(file_id, "file"), "file")
    kind = versions.Kind.APPEND if appends else versions.Kind.UPLOAD
    return versions.version_add(name=name, rows=rows, kind=kind, appends=appends)
