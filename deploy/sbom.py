"""Print a CycloneDX list of what this environment and this Debian hold: ``python sbom.py``.

Python packages come from their metadata, Debian's from dpkg where there is one. The output depends
on nothing else, so the same image gives the same list.
"""

import importlib.metadata
import json
import re
import shutil
import subprocess
from typing import Any
from urllib.parse import quote

DPKG_FORMAT = r"${Package}\t${Version}\t${Architecture}\n"


def python_packages() -> list[dict[str, Any]]:
    """Every installed distribution, with the licence that it states."""
    found = {}
    for distribution in importlib.metadata.distributions():
        metadata = distribution.metadata
        name, version = re.sub(r"[-_.]+", "-", metadata["Name"]).lower(), distribution.version
        purl = f"pkg:pypi/{quote(name)}@{quote(version)}"
        component = {"type": "library", "bom-ref": purl, "name": name, "version": version}
        component["purl"] = purl
        if expression := metadata.get("License-Expression"):
            component["licenses"] = [{"expression": expression}]
        elif (licence := metadata.get("License")) and len(licence) < 80 and "\n" not in licence:
            component["licenses"] = [{"license": {"name": licence}}]
        found.setdefault(purl, component)
    return [found[purl] for purl in sorted(found)]


def debian_packages() -> list[dict[str, Any]]:
    """What dpkg has installed; empty where there is no dpkg."""
    if not shutil.which("dpkg-query"):
        return []
    command = ["dpkg-query", "--show", f"--showformat={DPKG_FORMAT}"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    components = []
    for name, version, arch in sorted(line.split("\t") for line in lines):
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={arch}"
        component = {"type": "library", "bom-ref": purl, "name": name, "version": version}
        components.append({**component, "purl": purl})
    return components


def main() -> None:
    own = "magi-serve"
    version = importlib.metadata.version(own)
    subject = {"type": "container", "bom-ref": own, "name": own, "version": version}
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": subject},
        "components": [*python_packages(), *debian_packages()],
    }
    print(json.dumps(bom, indent=1))


if __name__ == "__main__":
    main()
