"""Read Parquet files."""

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from hetero_mpi.data.record_files import TEXT, OwnKeys
from hetero_mpi.data.record_shapes import PAIRS, PREFERENCE, SPELLINGS, BadRecord, unrecognised, without_text
from hetero_mpi.util.errors import UserError

BEGINS, SUFFIXES = (b"PAR1",), (".parquet",)
BATCH_ROWS = 1000
"""Number of rows of a parquet file to hold in memory at a time."""
_MESSAGE_COLUMNS = {*SPELLINGS, *PREFERENCE, "prompt", "completion", "history"}
"""Keys whose values may be messages."""


def read_records(path: Path, keys: OwnKeys, read_keys: Set[str]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a parquet file, reading only the columns that records use."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError(
            "records.package_missing",
            f"{path}: parquet files require the package pyarrow, which is not installed on rank 0's machine: run "
            f"`pip install pyarrow` (or `pip install 'hetero_mpi[parquet]'`) there",
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            columns = dict.fromkeys(file.schema_arrow.names)
            read_as = dict(zip(columns, names := keys.read(columns), strict=True))
            pairs = any(all({*keys} & {*names} for keys in pair) for pair in PAIRS.values())
            if read_keys is TEXT:
                pairs = "text" in names
            if not (pairs or {*PREFERENCE} <= {*names} or {*SPELLINGS} & {*names}):
                problem = without_text(columns) if read_keys is TEXT else unrecognised(dict(names))
                yield str(path), BadRecord("record.unknown_shape", problem, rest=True)
                return
            if not file.metadata.num_rows:
                raise UserError(
                    "records.empty", f"{path}: the file holds no records: it has no rows. Remove it, or add records."
                )
            unread = {name: True for name, key in read_as.items() if key not in read_keys}  # present, but not read
            rows = file.iter_batches(BATCH_ROWS, columns=[name for name in columns if name not in unread])
            for number, row in enumerate((row for batch in rows for row in batch.to_pylist()), start=1):
                value = {name: _without_nulls(inner, read_as[name] in _MESSAGE_COLUMNS) for name, inner in row.items()}
                yield f"{path}, row {number}", {**value, **unread}
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        yield str(path), BadRecord("records.damaged", f"damaged or not parquet: {reason}. Copy it again", rest=True)


def _without_nulls(value: Any, messages: bool = False) -> Any:
    """Drop the null keys that parquet adds, as all objects of a column share their keys; ``messages`` keep theirs."""
    if isinstance(value, list):
        return [_without_nulls(inner, messages) for inner in value]
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if messages or inner is not None}
    return value
