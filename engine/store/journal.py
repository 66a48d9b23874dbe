"""A JSONL file that grows record by record and survives a kill, and the settings that made it, in a JSON file beside.

    F.jsonl    one record per question, appended as soon as it is known, with checksums (records.py)
    F.json     {"settings": .., "figures": .., "records": ..}; figures, and the mark of F.jsonl, once all is done

Begun again with the same settings it goes on: half a line at its end, as a kill leaves it, is cut off; a record that
lacks keys (an answer that could not be had) is handed back, and the whole one supersedes it at the end.

Deliberately absent: locks, which its caller takes (`locked_file`).
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import Record
from thresher.common.records import RecordLog, read_object, write_object, write_records

REMEDY = "put a copy back, or choose another file to write"


class Journal:
    """done: ids with a whole record; partial: records that lack one of `needed`, by id. fault_of: what is wrong with a
    record that is there already, in words; None where nothing is.

    UserError where the file was made with other settings or by something else, or a line of it
    could not be gone on with.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        needed: Iterable[str],
        fault_of: Callable[[Record], str | None] = lambda record: None,
    ) -> None:
        self.path = Path(path)
        if self.path.suffix != ".jsonl":
            raise UserError(f"{path}: expected a name that ends in .jsonl, since it grows line by line")
        self.side = self.path.with_suffix(".json")
        self.settings = json.loads(json.dumps(settings))
        self.done: set[str] = set()
        self.partial: dict[str, Record] = {}
        self._superseded = False
        self._needed, self._fault_of = tuple(needed), fault_of
        self._log = RecordLog(self.path, remedy=REMEDY)
        if self.path.exists():
            self._take_up()

    def add(self, record: Record) -> None:
        """Append a record; when this returns, it survives a kill of the process."""
        if not self.path.exists():
            self._write_side({})  # first, for a file without it is not gone on with
        self._log.append(record)
        self._note(record)

    def records(self) -> Iterator[Record]:
        """Yield all records, once what is superseded has been dropped from the file."""
        if self._superseded:
            last = {record["id"]: number for number, record in self._log.recover()}
            write_records(self.path, (r for number, r in self._log.recover() if last[r["id"]] == number), closed=False)
            for _ in self._log.recover():
                pass
            self._superseded = False
        return (record for _, record in self._log.recover())

    def finish(self, figures: Mapping[str, Any]) -> None:
        self._write_side({"figures": figures, "records": self._log.finish()})

    def _write_side(self, more: Mapping[str, Any]) -> None:
        write_object(self.side, {"settings": self.settings, **more})

    def _take_up(self) -> None:
        if not self.side.exists():
            raise UserError(f"{self.path}: exists, without the {self.side.name} of a run to go on with; choose another")
        side = read_object(self.side, remedy=REMEDY)
        made = side.get("settings")
        made = made if isinstance(made, dict) else {}
        for key in {**made, **self.settings}:
            if made.get(key) != self.settings.get(key):
                raise UserError(
                    f"{self.path}: was begun with {key} {json.dumps(made.get(key))}, not "
                    f"{json.dumps(self.settings.get(key))}; choose another file, or the settings in {self.side}"
                )
        for number, record in self._log.recover(side.get("records")):
            fault = self._fault_of(record) if isinstance(record.get("id"), str) else 'has no "id"'
            if fault is not None:
                raise UserError(f"{self.path}:{number}: {fault}; choose another file to write, or delete this one")
            self._note(record)

    def _note(self, record: Record) -> None:
        id_ = record["id"]
        self._superseded |= id_ in self.done or id_ in self.partial
        if all(key in record for key in self._needed):
            self.partial.pop(id_, None)
            self.done.add(id_)
        elif id_ not in self.done:
            self.partial[id_] = record
