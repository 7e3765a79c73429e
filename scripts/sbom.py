"""A CycloneDX bill of materials of the installed distribution, and the list of its licences.

    python -m scripts.sbom OUTPUT.json

It lists what Ridgeline needs at run time: its dependencies and theirs, as they are installed in
this environment, with versions, licences and package URLs.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement


def installed_closure(root: str) -> dict[str, Distribution]:
    """The distributions that `root` needs in this environment, by normalised name.

    PackageNotFoundError if `root` itself is not installed: the list would be empty.
    """
    distribution(Requirement(root).name)
    found: dict[str, Distribution] = {}
    waiting = [Requirement(root)]
    while waiting:
        requirement = waiting.pop()
        name = normalised(requirement.name)
        if name in found:
            continue
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:
            continue  # optional on this platform
        extras = requirement.extras or {""}
        for text in found[name].requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(needed)
    return found


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(package: Distribution) -> str:
    """The SPDX expression, else the first line of the licence field, else the classifiers."""
    metadata = package.metadata
    stated = metadata.get("License-Expression") or metadata.get("License") or ""
    first = stated.strip().splitlines()[0][:100] if stated.strip() else ""
    classifiers = metadata.get_all("Classifier") or []
    classified = [text.rsplit(" :: ", 1)[-1] for text in classifiers if text.startswith("License")]
    return first or ", ".join(classified) or "unknown"


def bill_of_materials(packages: dict[str, Distribution], root: str) -> dict[str, Any]:
    """The CycloneDX 1.5 document."""
    components = [
        {
            "type": "library",
            "name": name,
            "version": package.version,
            "purl": f"pkg:pypi/{name}@{package.version}",
            "bom-ref": f"pkg:pypi/{name}@{package.version}",
            "licenses": [{"license": {"name": licence_of(package)}}],
        }
        for name, package in sorted(packages.items())
        if name != root
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "name": root,
                "version": packages[root].version if root in packages else "0",
            }
        },
        "components": components,
    }


def main() -> None:
    """Write the document, and print the licences."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("output", type=Path)
    parser.add_argument("--root", default="ridgeline", help="distribution to describe")
    arguments = parser.parse_args()
    try:
        packages = installed_closure(arguments.root)
    except PackageNotFoundError:
        parser.error(f"{arguments.root} is not installed in this environment: make install")
    document = bill_of_materials(packages, arguments.root)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for name, package in sorted(packages.items()):
        print(f"{name:28} {package.version:16} {licence_of(package)}")


if __name__ == "__main__":
    main()
