"""Validates rendered Kubernetes objects strictly: built-in kinds against the schemas that the package
kubernetes-validate ships, custom resources against the schemas of a directory.

Arguments: the version of Kubernetes, the directory, files. Prints each object as a line of JSON with what is wrong with it.
"""

import json
import pathlib
import sys

import jsonschema
import kubernetes_validate
import yaml


def strict(schema):
    """Forbids fields that a schema does not name, as the API server reports them with strict validation."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    open_ended = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and not open_ended:
        closed["additionalProperties"] = False
    return closed


def custom_resources(directory):
    found = {}
    for path in pathlib.Path(directory).glob("*.json"):
        crd = json.loads(path.read_text())
        for version, schema in crd["versions"].items():
            found[(f"{crd['group']}/{version}", crd["kind"])] = strict(schema)
    return found


def problem(document, version, custom):
    schema = custom.get((document.get("apiVersion"), document.get("kind")))
    try:
        if schema is None:
            kubernetes_validate.validate(document, version, strict=True)
        else:
            jsonschema.Draft202012Validator(schema).validate(document)
    except jsonschema.ValidationError as error:
        place = ".".join(str(part) for part in error.absolute_path)
        return f"{place}: {error.message}"
    except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.VersionNotSupportedError) as error:
        return error.message
    return None


def main():
    version, directory, *files = sys.argv[1:]
    custom = custom_resources(directory)
    for file in files:
        for document in yaml.safe_load_all(pathlib.Path(file).read_text()):
            print(json.dumps({"file": file, "object": document, "problem": problem(document, version, custom)}))


main()
