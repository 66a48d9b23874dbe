"""Models that no folder has: a server's, closed or too large, whose address the person who runs a paper gives.

    --answer-url gpt-4o=URL --answer-model gpt-4o=NAME --allow-key VARIABLE@HOST

The first names what a manifest calls the model; the second what the server calls it, where that is something else; the
third the environment variable with the key for that host.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from thresher.common.errors import UserError
from thresher.engine.reproduction.manifest import PaperManifest
from thresher.engine.scoring.endpoint import key_at

FLAGS = {  # of a command: model's name, address, key
    "eval": ("--answer-model", "--answer-url", "--answer-key-env"),
    "extract": ("--agent-name", "--agent-url", "--key-env"),
}
Pair = tuple[str, str]  # a model's name in the manifest, and what is said of it


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Where a model is asked: the address, its name there, and the environment variable of the key."""

    url: str
    model: str
    key_env: str | None = None

    def flags(self, words: Sequence[str]) -> list[str]:
        """What a command must be given besides, if it is this model that it asks of a server."""
        if words[0] not in FLAGS:
            return []
        name, url, key = FLAGS[words[0]]
        if (name, self.model) not in pairwise(words):
            return []
        return [url, self.url, *([] if self.key_env is None else [key, self.key_env])]


def servers_of(
    manifest: PaperManifest, urls: Sequence[Pair], names: Sequence[Pair], allow_keys: Sequence[str]
) -> Mapping[str, ServedModel]:
    """The servers by the manifest's names of their models. UserError for a name that it does not have, or that has no
    address, and for two models of one name."""
    served = [model.paper for model in manifest.models.values() if model.served]
    for flag, given in (("--answer-url", urls), ("--answer-model", names)):
        for name, value in given:
            if name not in served:
                there = f"choose of {', '.join(served)}" if served else "it has none; leave the flag out"
                raise UserError(f"reproduce: {flag} {name}={value}: {manifest.name} has no such model here; {there}")
    if without := [name for name, _ in names if name not in dict(urls)]:
        raise UserError(f"reproduce: --answer-model {without[0]}=..: give --answer-url {without[0]}=URL with it")
    found: dict[str, ServedModel] = {}
    for name, url in urls:
        variables = (allowed.rpartition("@")[0] for allowed in allow_keys)
        key = next((variable for variable in variables if key_at(variable, url) in allow_keys), None)
        called = dict(names).get(name, name)
        for other, server in found.items():
            if server.model == called and other != name:
                raise UserError(
                    f"reproduce: --answer-model: {other} and {name} are both called {called}; run them apart"
                )
        found[name] = ServedModel(url, called, key)
    return found
