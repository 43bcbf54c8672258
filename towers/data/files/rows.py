"""Rows of tables: CSV, TSV, lists in text files, JSON, JSON Lines and Parquet."""

import codecs
import csv
import io
import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence

from towers.data.files import reading
from towers.data.files.class_folders import split_of
from towers.data.files.paths import ending, is_image_name, reason
from towers.data.inventory import Inventory
from towers.errors import DataError
from towers.messages import shown

# Tables in the folders of their images, and the example of a competition's answer.
OF_IMAGES = ("metadata.", "_classes.csv")  # of Hugging Face, of Roboflow
SUBMISSION = re.compile("(?i)sample_?submission[^/]*$")
# Keys of JSON files that are not tables -> contents.
_OTHER_JSON = {
    "annotations": "annotations of COCO or Label Studio",
    "imagePath": "annotations of LabelMe",
    "_via_img_metadata": "annotations of VIA",
}


def read_rows(path: str, columns: Collection[str], inventory: Inventory) -> Iterator:
    """Yield the column names of a table, then (row number, values) of each row.

    The header is row 1 of a text file, unless `columns` are numbers.
    """
    kind = ending(path)
    try:
        if kind == ".parquet":
            yield from _parquet_rows(path, inventory)
        elif kind in (".json", ".jsonl", ".ndjson"):
            yield from _json_rows(_text(path))
        else:
            yield from _text_rows(_text(path), kind, columns)
    except RecursionError as error:
        raise DataError(f"{shown(path)}: is nested too deeply") from error
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{shown(path)}: {reason(error)}") from error


def looks_like_data(cells: Sequence[str], path: int) -> str:
    """Return advice for a table whose first row holds data instead of column names."""
    roles, rest = {path: "path"}, [n for n in range(len(cells)) if n != path]
    roles |= {n: "split" for n in rest[:-1] if split_of(cells[n])}
    others = [n for n in rest if n not in roles]
    if len(others) == 1:
        roles[others[0]] = "label"
    options = ",".join(f"{roles[n]}:{n + 1}" for n in sorted(roles))
    if others[1:]:
        options += ",label:N, where N is the number of the column of labels"
    return (
        f"row 1 looks like data ({shown(cells[path], 60)}); add a row of names above "
        f"it, or number the columns: --columns={options}"
    )


def _text(path):
    """Return the text of a file in UTF-8, or in UTF-16 with a byte order mark."""
    with reading.open_file(path) as file:
        content = file.read()
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        if not is_wide and b"\0" in content[:100]:
            raise UnicodeDecodeError("utf-8", content, 0, 1, "has zero bytes")
        return content.decode("utf-16" if is_wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        row = content.count(b"\n", 0, error.start) + 1
        way = "save the table as CSV UTF-8, or convert it: iconv -f LATIN1 -t UTF-8"
        raise ValueError(f"row {row}: is not UTF-8 ({error.reason}); {way}") from error


def _text_rows(text, kind, columns):
    named = re.match(r"sep=(.)(?=[\r\n])", text)  # for Excel
    lines = io.StringIO(text[named.end() :] if named else text, newline="")
    first = next(filter(str.strip, lines), "")
    delimiter = "\t" if kind == ".tsv" else max(",;\t", key=first.count)
    if named or (delimiter not in first and kind == ".csv"):
        delimiter = named[1] if named else "|"
    lines.seek(0)
    if kind == ".txt" and delimiter not in first:  # path and label, or more columns
        most = 1 if is_image_name("".join(first.rsplit(None, 1)[:1])) else -1
        rows = ((n, line.rsplit(None, most)) for n, line in enumerate(lines, 1))
    else:
        rows = _csv_rows(
            csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)
        )
    rows = ((number, row) for number, row in rows if row)
    number, row = next(rows, (1, []))
    cells = [cell.strip() for cell in row]
    images = [n for n, cell in enumerate(cells) if is_image_name(cell)]
    numbers = [str(n) for n in range(1, len(cells) + 1)]
    if kind == ".txt" and len(cells) == 2 and images == [0]:
        yield ["path", "label"]
    elif kind == ".lst" and len(cells) == 3 and images == [2]:  # of MXNet's im2rec
        yield ["number", "label", "path"]
    elif columns and {*columns} <= {*numbers} and cells[:2] != ["0", "1"]:
        yield numbers
    elif images:
        raise ValueError(looks_like_data(cells, images[0]))
    else:
        yield cells
        row = []  # it was the header
    if row:
        yield number, row
    yield from rows


def _csv_rows(reader):
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"row {reader.line_num}: {error}") from error


def _json_rows(text):
    """Yield the rows of a list of objects, or of concatenated objects."""
    objects, end, text = [], 0, text.strip()
    while end < len(text):
        value, end = json.JSONDecoder().raw_decode(text, end)
        objects += value if isinstance(value, list) else [value]
        end = re.compile(r"\s*").match(text, end).end()
    for number, value in enumerate(objects, 1):
        if not isinstance(value, dict):
            raise ValueError(f"row {number}: is not an object {{...}}")
    names = dict.fromkeys(itertools.chain(*objects))
    content = next((text for key, text in _OTHER_JSON.items() if key in names), "")
    if any(map(is_image_name, names)):
        content = "names of images as keys"
    if content:
        example = '[{"image": "1.jpg", "label": "cat"}]'
        raise ValueError(f"holds {content}, not a table, such as {example} or a CSV")
    yield list(names)
    for number, value in enumerate(objects, 1):
        yield number, [value.get(name) for name in names]


def _parquet_rows(path, inventory):
    import pyarrow
    from pyarrow import parquet, types

    def is_read(kind):
        if types.is_list(kind) or types.is_large_list(kind):  # several labels
            kind = kind.value_type
        return not types.is_nested(kind) and not types.is_binary(kind)

    try:
        table = parquet.ParquetFile(reading.local_copy(path), memory_map=True)
        names = [x.name for x in table.schema_arrow if is_read(x.type)]
        others = [name for name in table.schema_arrow.names if name not in names]
        inventory.leave_out("columns", *others)
        yield names
        batches = table.iter_batches(columns=names)
        columns = ([x.to_pylist() for x in batch.columns] for batch in batches)
        yield from enumerate((row for x in columns for row in zip(*x, strict=True)), 1)
    except pyarrow.ArrowException as error:
        raise ValueError(f"is not a Parquet file: {error}") from error
