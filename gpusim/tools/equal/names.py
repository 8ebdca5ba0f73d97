"""The names of modules and parameters, from the outermost module on, without wrappers' parts.

DistributedDataParallel, FSDP, torch.compile, checkpoint wrappers and such have one child and no
parameters of their own: the child takes the wrapper's name, so that names are the same with it and
without it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

__all__ = ["Names", "is_wrapper", "parameters", "site_of", "submodules"]

WRAPPED = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module only wraps another."""
    children = [name for name, child in module._modules.items() if child is not None]
    return len(children) == 1 and children[0] in WRAPPED


def submodules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The module and those in it, each once, with their names; no wrappers."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        wraps = is_wrapper(module)
        if not wraps:
            yield name, module
        for part, child in module._modules.items():
            if child is not None:
                inner = name if wraps else f"{name}.{part}" if name else part
                yield from walk(child, inner)

    yield from walk(module, name)


def parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a module, each once, with their names."""
    seen: set[int] = set()
    owners = [*submodules(module)]
    owners += [(name, each) for name, each in _wrappers(module) if each._parameters]
    for name, owner in owners:
        for part, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield (f"{name}.{part}" if name else part), parameter


def _wrappers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, each in module.named_modules():
        if is_wrapper(each):
            yield ".".join(part for part in name.split(".") if part not in WRAPPED), each


def site_of(module: nn.Module) -> str:
    """file:line of the module's forward; of torch's own, of the class's name alone."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or type(module).__module__.startswith("torch.nn.modules"):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


class Names:
    """The outermost modules, and the names of all in them.

    Owner: the rank's main thread.
    """

    def __init__(self) -> None:
        #: Of each module that was put into another: that one. By the module hook, from the start.
        self._parents: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = (
            weakref.WeakKeyDictionary()
        )
        #: Outermost modules with their tags, in the order in which they were called first.
        self.roots: dict[str, nn.Module] = {}
        self._tags: dict[int, str] = {}
        self._modules: dict[int, tuple[str, str, Any]] = {}
        self._parameters: dict[int, tuple[str, str]] = {}
        #: Of each root and name: the class and file:line of its forward.
        self.about: dict[str, tuple[str, str]] = {}

    def note_child(self, parent: nn.Module, name: str, child: nn.Module | None) -> None:
        """Torch's hook as a module is put into another."""
        if child is not None:
            self._parents[child] = weakref.ref(parent)

    def of(self, module: nn.Module, outer: nn.Module | None) -> tuple[str, str] | None:
        """The tag of the outermost module, and the module's name in it.

        `outer` is the outermost module that is being called, if any. None for a module that is part
        of no other and has no parameters, such as a Softmax that a forward pass makes: it has no
        name.
        """
        found = self._modules.get(id(module))
        if found is not None and found[2]() is module:
            return found[:2]
        top = outer or self._top(module)
        if outer is not None or _has_parameters(top):
            self._take(top)
        found = self._modules.get(id(module))
        if (found is None or found[2]() is not module) and outer is not None:
            own = self._top(module)  # called by the other, but no part of it
            if _has_parameters(own):
                self._take(own)
                found = self._modules.get(id(module))
        if found is not None and found[2]() is module:
            return found[:2]
        return None if outer is not None and outer is not module else (_kind(module), "")

    def of_parameter(self, parameter: Tensor) -> tuple[str, str] | None:
        return self._parameters.get(id(parameter))

    def refresh(self) -> None:
        """Read the parameters again, which frameworks replace."""
        self._parameters.clear()
        for tag, root in self.roots.items():
            for name, parameter in parameters(root):
                self._parameters.setdefault(id(parameter), (tag, name))

    def weights(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """All parameters of the roots, each once: tag, name, parameter."""
        seen: set[int] = set()
        for tag, root in self.roots.items():
            for name, parameter in parameters(root):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield tag, name, parameter

    def aliases(self) -> dict[str, str]:
        """Of parameters that have several names, the others, with the first."""
        found: dict[str, str] = {}
        for tag, root in self.roots.items():
            first: dict[int, str] = {}
            for owner_name, owner in submodules(root):
                for part, parameter in owner._parameters.items():
                    if parameter is None:
                        continue
                    name = f"{owner_name}.{part}" if owner_name else part
                    known = first.setdefault(id(parameter), name)
                    if known != name:
                        found[f"{tag}/{name}"] = known
        return found

    def _top(self, module: nn.Module) -> nn.Module:
        for _ in range(1000):
            reference = self._parents.get(module)
            parent = reference() if reference is not None else None
            if parent is None or all(each is not module for each in parent._modules.values()):
                return module
            module = parent
        return module

    def _take(self, root: nn.Module) -> None:
        """Note the names in an outermost module, or note them again as it has changed."""
        tag = self._tags.get(id(root))
        if tag is None:
            inner = next((each for _, each in submodules(root)), root)
            kind = _kind(inner)
            tag, n = kind, 1
            while tag in self.roots:
                n += 1
                tag = f"{kind}#{n}"
            self.roots[tag] = root
            self._tags[id(root)] = tag
        for name, module in submodules(root):
            self._modules[id(module)] = tag, name, weakref.ref(module)
            self.about[f"{tag}/{name}"] = _kind(module), site_of(module)
        for _, wrapper in _wrappers(root):
            self._modules.setdefault(id(wrapper), (tag, "", weakref.ref(wrapper)))
        for name, parameter in parameters(root):
            self._parameters.setdefault(id(parameter), (tag, name))


def _kind(module: nn.Module) -> str:
    """The class's name as the program wrote it: FSDP2 puts its own before it."""
    for kind in type(module).__mro__:
        if not kind.__module__.startswith(
            "torch.distributed.fsdp"
        ) and not kind.__name__.startswith("FSDP"):
            return kind.__name__
    return type(module).__name__


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
