"""Write run.txt and dev.txt: the versions of constraints.txt with the hashes of all files that an index has of them.

    .venv/bin/python requirements/renew.py INDEX

after constraints.txt has changed and is installed; INDEX is the address that `pip download --verbose` looks in.
"""

import re
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path
from urllib.request import Request, urlopen

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name
from packaging.utils import parse_sdist_filename as parse_sdist
from packaging.utils import parse_wheel_filename as parse_wheel

HERE = Path(__file__).parent
UNCHECKED = {"torch"}  # another file in every index: see docs/explanation/dependencies.md
HEAD = "# Made by requirements/renew.py from constraints.txt; docs/explanation/dependencies.md says what for.\n"


def pins() -> dict[str, str]:
    """Return the versions of constraints.txt by name."""
    lines = (HERE.parent / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {str(canonicalize_name(name)): version for name, version in pairs}


def needed(wanted: list[str], extras: set[str], found: set[str]) -> set[str]:
    """Return what these requirements need, directly and indirectly, as the installed packages say."""
    for requirement in map(Requirement, wanted):
        marker, name = requirement.marker, str(canonicalize_name(requirement.name))
        if (marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})) and name not in found:
            found.add(name)
            needed(requires(name) or [], requirement.extras, found)
    return found


def fits(tag: Tag) -> bool:
    """Whether one of the Python versions that this project runs on may install a wheel with this tag."""
    version = re.fullmatch(r"cp3(\d+)", tag.interpreter)
    return tag.interpreter.startswith("py") or bool(version and (int(version[1]) >= 11 or tag.abi == "abi3"))


def is_of(file: str, version: str) -> bool:
    """Whether a file is of this release, and of use."""
    try:
        if file.endswith(".whl"):
            _, found, _, tags = parse_wheel(file)
            return str(found) == version and any(map(fits, tags))
        return str(parse_sdist(file)[1]) == version
    except (InvalidWheelFilename, InvalidSdistFilename):  # eggs and installers of old
        return False


def hashes(index: str, name: str, version: str) -> list[str]:
    """Return the hashes of a release's files; by the page that every index has (PEP 503)."""
    page = urlopen(Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": "text/html"})).read().decode()
    files = re.findall(r'href="[^"#]*#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)\s*<', page)
    return sorted({sha for sha, file in files if is_of(file, version)})


def main(index: str) -> int:
    """Write both files."""
    versions = pins()
    texts = {}
    for name in sorted(versions.keys() - UNCHECKED):
        if not (found := hashes(index, name, versions[name])):
            sys.exit(f"{index} has no file of {name} {versions[name]}")
        texts[name] = " \\\n".join([f"{name}=={versions[name]}", *(f"    --hash=sha256:{sha}" for sha in found)]) + "\n"
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    run = needed([*wanted, *extras["report"], *extras["video"]], set(), set())
    of = {"run.txt": [name for name in texts if name in run], "dev.txt": [name for name in texts if name not in run]}
    for file, names in of.items():
        first = HEAD + ("-r run.txt\n" if file == "dev.txt" else "")
        (HERE / file).write_text(first + "".join(texts[name] for name in names), encoding="utf-8")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
