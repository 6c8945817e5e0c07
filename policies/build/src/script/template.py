"""Runs the source that a build wrote into SLOT, as the module `policy`, when the component is first called."""

import sys
import types

import pointsman_policy


def preload():
    """Loads the modules that the source imports: a component can load none."""
    # IMPORTS
    return pointsman_policy


preload()

UNIT = b"UNIT_TEXT"
# One allocation, so that memory has one copy. A build writes the length as 16 digits, and the source.
SLOT = UNIT * (SLOT_BYTES // len(UNIT))

exports = []


def run():
    policy = types.ModuleType("policy")
    policy.__file__ = "/0/policy.py"
    sys.modules["policy"] = policy
    source = SLOT[16:16 + int(SLOT[:16])]
    exec(compile(source, policy.__file__, "exec", dont_inherit=True), policy.__dict__)
    for export in exports:
        export.exported = getattr(policy, type(export).__name__)()


class Export:
    """Stands for a class that the source exports. A method is looked up once."""

    exported = None

    def __init__(self):
        exports.append(self)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if self.exported is None:
            run()
        method = getattr(self.exported, name)
        setattr(self, name, method)
        return method


class Policy(Export):
    pass


class Filtering(Export):
    pass


class Scoring(Export):
    pass


class Selecting(Export):
    pass


class Disaggregation(Export):
    pass
