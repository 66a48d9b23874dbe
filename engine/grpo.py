"""`GRPO`: training from Python, with a function as reward and without a recipe file.

    GRPO(model="models/SmolLM2-135M-Instruct", reward=score, prompts=[..], steps=50, lr=1e-5).train()

It makes the same recipe as a file would, with the system `plain` (engine/systems/_plain.py), and calls `train`: the run
folder is that of any run.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError, as_number, shown
from thresher.common.jsonl import write_jsonl
from thresher.common.signals import handle_signals
from thresher.engine.config.recipe import Recipe, make_recipe
from thresher.engine.config.tables import hints, keys, section_in
from thresher.engine.progress import progress_to
from thresher.engine.systems import load_system, own_digest
from thresher.engine.systems._plain import IN_PROCESS, given
from thresher.engine.training.train import train
from thresher.policy.tokenizer import load_tokenizer
from thresher.retrieval.questions import Question, question_record

Reward = Callable[..., Any]
Records = str | Path | Iterable[Mapping[str, Any] | Question | str]
# Sections whose keys may be given bare; those of the second only if no section of the first has them.
BARE = (("run", "rollout", "grpo", "optim", "model", "data", "retrieval"), ("lora", "judge"))
OF_SYSTEM = ("options", "template")
FROM_TRL = {
    "num_generations": "group_size",
    "learning_rate": "lr",
    "max_steps": "steps",
    "epsilon": "both clip_low and clip_high",
    "epsilon_high": "clip_high",
    "loss_type": "objective",
    "max_completion_length": "max_turn_tokens",
}


class GRPO:
    """A training run: a model, a reward, and prompts or questions.

    model: its folder. reward: a function, or several whose values are added up (engine/systems/_plain.py says what
    their parameters get); "FILE.py:FUNCTION" names one of a file. weights: of several rewards. prompts: texts.
    questions: a file of questions, or records {"question", ..} whose other keys may be parameters of a reward. dev: the
    same, for evaluations. system: the name or path of a system with its own reward, in place of `reward`; its options
    and its template are keywords. out: the run's folder; the questions of this call are written next to it. keys: those
    of a recipe (docs/recipe.md), bare (`_set`), or a whole section as a table: GRPO(.., steps=50, optim={"lr": 1e-5}).
    """

    def __init__(
        self,
        model: str | Path,
        reward: Reward | str | Sequence[Reward | str] | None = None,
        *,
        prompts: Iterable[str] | None = None,
        questions: Records | None = None,
        dev: Records | None = None,
        weights: Sequence[float] | None = None,
        system: str | None = None,
        out: str | Path = "runs/grpo",
        **keys: Any,
    ) -> None:
        if (reward is None) == (system is None):
            raise UserError("GRPO: expected either reward, a function, or system, a name, and not both")
        if system is not None and weights is not None:
            raise UserError("GRPO: weights belong to rewards; leave them out with system")
        if isinstance(prompts, str):
            raise UserError("GRPO: prompts is one text; give a list of texts, or questions, a file")
        if (prompts is None) == (questions is None):
            raise UserError("GRPO: expected either prompts, texts, or questions, records or a file, and not both")
        self.out = Path(out)
        self._given: dict[str, Any] = {}  # rewards of this process, by name
        chosen: dict[str, Any] = {"name": system} if system is not None else _plain(reward, weights, self._given)
        chat = load_tokenizer(model).chat_template is not None
        tables: dict[str, Any] = {
            "model": {"path": str(model), "prompt": "chat" if chat else "raw"},
            "system": chosen,
            "data": {"train": self._file("train", prompts if questions is None else questions)},
        }
        if dev is not None:
            tables["data"]["dev"] = self._file("dev", dev)
        for key, value in keys.items():
            _set(tables, key, value)
        options: dict[str, Any] = chosen.get("options", {})
        self.recipe: Recipe = make_recipe(tables, "GRPO", preset=lambda name: load_system(name, options).preset)

    def train(self, resume: bool = False) -> dict[str, Any]:
        """Train and print the progress; return the content of summary.json. resume: continue from the last
        checkpoint."""
        given.update(self._given)  # another GRPO may have functions of the same names
        with handle_signals(), console.progress_line("train", self.recipe.run.steps) as line:
            return train(self.recipe, self.out, resume, progress_to(line, self.recipe, self.out))

    def _file(self, name: str, records: Records | None) -> str:
        """Return the file of these questions; records are first written to one next to the run's folder."""
        if isinstance(records, str | Path):
            return str(records)
        rows = [_record(one, number) for number, one in enumerate(records or ())]
        if not rows:
            raise UserError(f"GRPO: there are no {name} questions; give at least one")
        self.out.parent.mkdir(parents=True, exist_ok=True)
        path = self.out.with_name(f"{self.out.name}.{name}.jsonl")
        try:
            write_jsonl(path, rows)
        except (TypeError, ValueError) as error:
            raise UserError(f"GRPO: the {name} questions cannot be written as JSON: {error}") from error
        return str(path)


def _record(one: Mapping[str, Any] | Question | str, number: int) -> dict[str, Any]:
    if isinstance(one, Question):
        return question_record(one)
    if isinstance(one, str):
        return {"id": str(number), "question": one}
    if not isinstance(one, Mapping):
        raise UserError(
            f"GRPO: question {number} is {type(one).__name__}; expected a text, or a record with a question"
        )
    if not isinstance(one.get("question"), str):
        raise UserError(
            f"GRPO: question {number} has no text under the key question; its keys are {', '.join(map(str, one))}"
        )
    return {"id": str(number), **one}


def _plain(reward: Any, weights: Sequence[float] | None, own: dict[str, Any]) -> dict[str, Any]:
    several = isinstance(reward, Sequence) and not isinstance(reward, str)
    rewards = list(reward) if several else [reward]
    options: dict[str, Any] = {"rewards": [_name(one, own) for one in rewards]}
    if weights is not None:
        if not isinstance(weights, Sequence) or any(as_number(weight) is None for weight in weights):
            raise UserError(f"GRPO: weights is {shown(weights)}; expected a list with a number for each reward")
        options["weights"] = [float(weight) for weight in weights]
    return {"name": "plain", "options": options}


def _name(reward: Any, own: dict[str, Any]) -> str:
    """Return the name of a reward, and add it to `own`. It is the file and function if a module of a file has the
    reward, so that the run can be evaluated and resumed by any process; else a name valid in this process, the same
    for a function that is defined again. This process calls the object itself."""
    if isinstance(reward, str):
        return reward
    if not callable(reward):
        raise UserError(f"GRPO: a reward is {type(reward).__name__}; expected a function, or FILE.py:FUNCTION")
    inner = reward.func if isinstance(reward, partial) else reward
    name = getattr(inner, "__name__", type(inner).__name__)
    module = sys.modules.get(getattr(reward, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    # A script (no __spec__, or __main__) must not train again when its reward is imported.
    imported = getattr(module, "__spec__", None) is not None and module.__name__ != "__main__"  # type: ignore[union-attr]
    imported = imported and file is not None and Path(file).suffix == ".py" and getattr(module, name, None) is reward
    if imported and _stands_alone(module, str(file)):
        key = f"{file}:{name}"
    else:
        key = f"{IN_PROCESS}{name}"
        while own.get(key, reward) != reward:  # a bound method is a new object each time
            key += "_"
    own[key] = given[key] = reward
    return key


def _stands_alone(module: Any, file: str) -> bool:
    """Return whether the file can be imported without the package that it may be part of."""
    if not module.__package__:
        return True
    try:
        own_digest(file)
    except UserError:
        return False
    return True


def _set(tables: dict[str, Any], key: str, value: Any) -> None:
    """Put a keyword into the tables: a section, "section.key", or the bare key of one section. UserError for others."""
    sections = {name: section_in(hint) for name, hint in hints(Recipe).items()}
    if key in sections and isinstance(value, Mapping):
        tables.setdefault(key, {}).update(value)
        return
    section, dot, name = key.partition(".")
    if dot:
        tables.setdefault(section, {})[name] = value
        return
    if key in OF_SYSTEM:
        before = tables["system"].get(key)
        tables["system"][key] = {**before, **value} if before and isinstance(value, Mapping) else value
        return
    having = ([one for one in some if (kind := sections[one]) is not None and key in keys(kind)] for some in BARE)
    found = next((some for some in having if some), [])
    if len(found) != 1:
        what = f"is a key of {' and '.join(found)}" if found else "is not a key of a recipe"
        hint = f"write {found[0]}={{{key!r}: ..}}" if found else "docs/recipe.md lists them all"
        hint = f"TRL's {key} is {FROM_TRL[key]} here" if key in FROM_TRL else hint
        raise UserError(f"GRPO: {key} {what}; {hint}")
    tables.setdefault(found[0], {})[key] = value
