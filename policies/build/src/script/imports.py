"""Prints what a policy imports when it is loaded, as sorted statements. Fails where only the whole build can tell."""

import ast
import re
import sys

KNOWN = sys.stdlib_module_names | {"componentize_py_types", "pointsman_policy", "wit_world"}


def imports(body):
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                sys.exit(f"line {node.lineno}: a relative import")
            for alias in node.names:
                every = alias.name == "*"
                yield node.module, f"import {node.module}" if every else f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.ClassDef):
            yield from imports(node.body)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            pass  # does not run when the module is loaded
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imports(node.orelse)
        elif any(isinstance(inner, (ast.Import, ast.ImportFrom)) for inner in ast.walk(node)):
            sys.exit(f"line {node.lineno}: an import that may not run")


with open(sys.argv[1], "rb") as file:
    source = file.read()
cookie = re.match(rb"(?:[^\n]*\n)?[ \t\f]*#[^\n]*?coding[:=][ \t]*([-\w.]+)", source)
if cookie and cookie[1].lower() not in (b"utf-8", b"utf8"):
    sys.exit("another encoding than UTF-8")
source.decode("utf-8")
found = {(module, text) for module, text in imports(ast.parse(source).body) if module != "__future__"}
unknown = sorted(module for module, _ in found if module.split(".")[0] not in KNOWN)
if unknown:
    sys.exit(f"modules that are not of the standard library: {', '.join(unknown)}")
for text in sorted(text for _, text in found):
    print(f"    {text}")
