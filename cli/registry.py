"""Commands are found, not listed: a module in a folder of commands is a command, and a folder in it is a group.

    cli/commands/train.py         thresher train          HELP, PLACE, EXAMPLE, add_arguments(parser), run(options)
    cli/commands/index/           thresher index ..       HELP, PLACE, EXAMPLE and METAVAR, in its __init__.py
    cli/commands/index/build.py   thresher index build    as train.py

An underscore in a file's name is a hyphen in the command's. PLACE orders `--help`, smallest first, and EXAMPLE, a
command as it is typed, ends it. Every module is imported whenever the parser is built, so what a command needs for its
work is imported inside its functions.

Deliberately absent: a list of all commands. tests/cli/command_line.txt has one, and a test compares.
"""

import argparse
import pkgutil
from importlib import import_module
from types import ModuleType

from thresher.cli.parsing.parser import add_common, example


def add_commands(parser: argparse.ArgumentParser, package: ModuleType) -> None:
    """Give `parser` the commands and the groups that lie in the folder of `package`."""
    commands = parser.add_subparsers(required=True, metavar=package.METAVAR)
    parser.epilog = example(package.EXAMPLE)
    for module in members(package):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        if hasattr(module, "__path__"):
            add_commands(command, module)
        else:
            command.epilog = example(module.EXAMPLE)
            module.add_arguments(command)
            add_common(command)
            command.set_defaults(handler=module.run)


def members(package: ModuleType) -> list[ModuleType]:
    """The modules of a folder of commands, imported, in the order of their PLACE."""
    found = [import_module(f"{package.__name__}.{info.name}") for info in pkgutil.iter_modules(package.__path__)]
    return sorted(found, key=lambda module: (module.PLACE, module.__name__))
