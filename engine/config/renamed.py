"""Recipe keys and flags that were renamed. The old name is read for one release, with a warning on stderr."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError

KEYS = {
    "rollout.max_running": "rollout.max_num_seqs",
    "rollout.page_size": "rollout.kv_block_size",
    "rollout.speculate": "rollout.num_draft_tokens",
    "grpo.importance": "grpo.tis_level",
    "grpo.importance_rule": "grpo.tis_rule",
    "grpo.importance_cap": "grpo.tis_cap",
    "grpo.importance_floor": "grpo.tis_floor",
    "optim.moments": "optim.optimizer_state_dtype",
    "run.sinks": "run.trackers",
    "sft.gate": "sft.stop_at_copy_accuracy",
    "judge.remember": "judge.cache_size",
    "judge.patience": "judge.retry_seconds",
}
FLAGS = {
    "--from": "--resume-from",
    "--best": "--best-of",
    "--noise": "--distractors",
    "--max-running": "--max-num-seqs",
}


def current_tables(tables: dict[str, Any], where: str) -> dict[str, Any]:
    """Rename the old keys of a recipe's tables in place, and return the tables.

    where: name of the tables in the warning. UserError for a key that is set under both names.
    """
    for old, new in KEYS.items():
        (section, key), name = old.split("."), new.partition(".")[2]
        table = tables.get(section)
        if not isinstance(table, Mapping) or key not in table:
            continue
        if name in table:
            raise UserError(f"{where}: [{section}] {key} is the old name of {name}, which is there too; leave one out")
        # Keep the order of keys, because errors name the first wrong key.
        tables[section] = {name if each == key else each: value for each, value in table.items()}
        _warn(where, old, new)
    return tables


def current_override(text: str) -> str:
    """Return the "section.key=value" of `--set` with the current name of its key."""
    key, equals, value = text.partition("=")
    if (old := key.strip()) not in KEYS:
        return text
    _warn("--set", old, KEYS[old])
    return KEYS[old] + equals + value


def current_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with the current names of flags. Words after `--` are not flags."""
    end = words.index("--") if "--" in words else len(words)
    found = list(words)
    for place, word in enumerate(words[:end]):
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            _warn("thresher", flag, FLAGS[flag])
            found[place] = FLAGS[flag] + equals + value
    return found


@cache
def _warn(where: str, old: str, new: str) -> None:
    """Print the warning, once per process for each `where`, `old` and `new`."""
    text = f"{where}: {old} is now called {new}; the old name is read until the next release"
    print(console.visible(text), file=sys.stderr)
