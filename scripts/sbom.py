#!/usr/bin/env python3
"""Prints a CycloneDX 1.5 SBOM: scripts/sbom.py VERSION IMAGE.tar

Crates come from Cargo.lock as `cargo metadata` resolves it for the programs (without crates that only tests or build scripts of
other platforms use), Debian packages from dpkg's list in the image, an OCI archive.
"""

import gzip
import io
import json
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def crates():
    target = f"{platform.machine()}-unknown-linux-gnu"
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", target]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
    packages = {package["id"]: package for package in found["packages"]}
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    programs = {line for line in (ROOT / "image/binaries").read_text().split("\n") if line and not line.startswith("#")}
    left = [p["id"] for p in packages.values() if programs & {t["name"] for t in p["targets"] if "bin" in t["kind"]}]
    seen = set()
    while left:
        here = left.pop()
        if here in seen:
            continue
        seen.add(here)
        for dependency in nodes[here]["deps"]:
            if any(kind["kind"] != "dev" for kind in dependency["dep_kinds"]):
                left.append(dependency["pkg"])
    for package in sorted((packages[i] for i in seen), key=lambda p: (p["name"], p["version"])):
        component = {
            "type": "library",
            "name": package["name"],
            "version": package["version"],
            "bom-ref": f"pkg:cargo/{package['name']}@{package['version']}",
            "purl": f"pkg:cargo/{package['name']}@{package['version']}",
        }
        if package["license"]:
            component["licenses"] = [{"expression": " ".join(package["license"].replace("/", " OR ").split())}]
        yield component


def debian_packages(image):
    with tarfile.open(image) as archive:

        def blob(descriptor):
            return archive.extractfile("blobs/" + descriptor["digest"].replace(":", "/")).read()

        index = json.loads(archive.extractfile("index.json").read())
        manifest = json.loads(blob(index["manifests"][0]))
        status = None
        for layer in manifest["layers"]:
            data = blob(layer)
            if layer["mediaType"].endswith("gzip"):
                data = gzip.decompress(data)
            with tarfile.open(fileobj=io.BytesIO(data)) as tree:
                for name in ("./var/lib/dpkg/status", "var/lib/dpkg/status"):
                    try:
                        status = tree.extractfile(name).read().decode()
                    except KeyError:
                        continue
    if status is None:
        sys.exit(f"sbom.py: {image} has no list of Debian packages")
    for paragraph in status.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.split("\n") if ": " in line and not line.startswith(" "))
        if fields.get("Status") != "install ok installed":
            continue
        purl = f"pkg:deb/debian/{fields['Package']}@{fields['Version']}?arch={fields['Architecture']}"
        yield {"type": "library", "name": fields["Package"], "version": fields["Version"], "bom-ref": purl, "purl": purl}


def main():
    if len(sys.argv) != 3 or sys.argv[1] in ("-h", "--help"):
        sys.exit(__doc__)
    version, image = sys.argv[1:]
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "forebay", "version": version}},
        "components": [*crates(), *debian_packages(image)],
    }
    print(json.dumps(bom, indent=1))


main()
