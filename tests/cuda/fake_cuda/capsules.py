"""Replacing the functions of a Cython module, also for modules that call them from C.

A Cython module offers C functions in `__pyx_capi__`, as capsules that are named by the function's
type, and others copy the pointers when they are imported. So a C function of the same type, made
from that name, takes the place of each: it calls a Python function. Only a C++ compiler is needed.
"""

from __future__ import annotations

import atexit
import ctypes
import re
from collections.abc import Callable, Mapping
from typing import Any

from . import compiler

OPENING = """
#include <cstddef>
#include <cstdint>
extern "C" {
struct PyObject;
extern PyObject* callbacks[512];
PyObject* callbacks[512];
extern int over;
int over = 0;  // set when Python ends, after which memory is still freed
PyObject* PyObject_CallFunction(PyObject*, const char*, ...);
PyObject* Py_BuildValue(const char*, ...);
long long PyLong_AsLongLong(PyObject*);
double PyFloat_AsDouble(PyObject*);
void Py_DecRef(PyObject*);
static long long integer(PyObject* found, long long error) {
  if (!found) return error;
  long long value = PyLong_AsLongLong(found);
  Py_DecRef(found);
  return value;
}
static double number(PyObject* found) {
  if (!found) return 0;
  double value = PyFloat_AsDouble(found);
  Py_DecRef(found);
  return value;
}
"""
INTEGERS = {"int", "size_t", "intptr_t", "uintmax_t", "unsigned int", "cudaMemcpyKind"}
KEPT = {"check_status", "_export_enum"}  # which call nothing
NAME = ctypes.pythonapi.PyCapsule_GetName
NAME.restype, NAME.argtypes = ctypes.c_char_p, [ctypes.py_object]
NEW = ctypes.pythonapi.PyCapsule_New
NEW.restype = ctypes.py_object
NEW.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _definition(name: str, number: int, signature: str) -> str | None:
    """The C function that calls callback `number`; None for types that it cannot pass on."""
    match = re.fullmatch(r"(.+?) ?\((.*)\)", signature)
    assert match is not None, signature
    result, types = match[1], match[2].split(", ")
    parameters, formats, values = [], "", []
    for place, kind in enumerate(types if match[2] != "void" else ()):
        if kind == "int __pyx_skip_dispatch":
            parameters.append("int")
        elif "__pyx_optional_args" in kind:
            parameters.append("void*")
        elif kind in INTEGERS:
            parameters.append(f"{'int' if kind == 'cudaMemcpyKind' else kind} a{place}")
            formats, values = formats + "L", [*values, f"(long long)a{place}"]
        elif kind == "PyObject *":
            parameters.append(f"PyObject* a{place}")
            formats, values = formats + "O", [*values, f"a{place}"]
        else:
            return None
    called = ", ".join([f"callbacks[{number}]", f'"({formats})"', *values])
    called = f'over ? Py_BuildValue("i", 0) : PyObject_CallFunction({called})'
    if "*" in result:
        result, called = "PyObject*", called
    elif result == "float":
        called = f"number({called})"
    elif result in INTEGERS:
        # CuPy's functions that make a handle say 0 for an error, and the others -1.
        called = f"integer({called}, {0 if result == 'intptr_t' else -1})"
    else:
        return None
    return f"{result} fake_{name}({', '.join(parameters)}) {{ return {called}; }}\n"


_kept: list[Any] = []


def replace(module: Any, functions: Callable[[str], Callable[..., Any]]) -> None:
    """Put `functions(name)` in the place of every function of a Cython module."""
    capsules: Mapping[str, Any] = module.__pyx_capi__
    source, numbers = OPENING, {}
    for number, (name, capsule) in enumerate(capsules.items()):
        if name not in KEPT and b"(" in (signature := NAME(capsule)):
            definition = _definition(name, number, signature.decode())
            if definition is not None:
                source, numbers[name] = source + definition, number
    source += "}\n"
    library = ctypes.CDLL(str(compiler.build_library(source, module.__name__)))
    atexit.register(setattr, ctypes.c_int.in_dll(library, "over"), "value", 1)
    callbacks = (ctypes.py_object * 512).in_dll(library, "callbacks")
    for name, number in numbers.items():
        function = functions(name)
        callbacks[number] = function
        signature = NAME(capsules[name])
        address = ctypes.cast(getattr(library, f"fake_{name}"), ctypes.c_void_p)
        _kept.extend([function, signature])
        capsules[name] = NEW(address, signature, None)
    for name, value in list(vars(module).items()):  # Python's functions
        if callable(value) and not isinstance(value, type) and name not in KEPT:
            setattr(module, name, functions(name))
