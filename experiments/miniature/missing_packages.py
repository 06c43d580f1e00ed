"""Empty packages in place of those that are not installed, for modules that import them and do not use them."""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Collection
from unittest import mock


def allow_missing(packages: Collection[str]) -> None:
    """Let further imports of packages succeed. Those that are installed are taken as they are."""
    sys.meta_path.append(_Missing(packages))  # asked after all other finders


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules of the packages that no other finder has found."""

    def __init__(self, packages: Collection[str]):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        known = name.split(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec):
        return _Nothing(spec.name)

    def exec_module(self, module):
        pass


class _Nothing(types.ModuleType):
    """A package whose attributes do nothing."""

    __version__ = "0"

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(return_value=False)
