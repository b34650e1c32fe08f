"""The documents are true: their commands are commands, their links lead somewhere, the house is as the plan says."""

import io
import pkgutil
import re
import shlex

import pytest
from conftest import ROOT, by_path

from spr.cli import COMMANDS, main
from spr.cli_parser import make_parser

reference = by_path(ROOT / "docs" / "reference.py")

FRONT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "results/README.md")]
PAGES = [*FRONT, *sorted((ROOT / "docs").rglob("*.md"))]
# Diaries may speak of what is gone, and tables and generated pages may be as long as they need.
FOR_USERS = [
    page for page in PAGES if page.parent.name not in {"lab", "reference", "results"} and page.name != "CHANGELOG.md"
]


def commands(page):
    """The lines of a page's code blocks that call spr, without their comments."""
    found = []
    for language, block in re.findall(
        r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    ):
        for line in block.splitlines() if not language else ():
            words = shlex.split(line, comments=True)
            if words and words[0].removeprefix(".venv/bin/") == "spr":
                found.append(words[1:])
    return found


ALL = [(str(page.relative_to(ROOT)), words) for page in PAGES for words in commands(page)]


@pytest.mark.parametrize(("page", "words"), ALL, ids=[" ".join([page, *words]) for page, words in ALL])
def test_every_command_of_the_documents_is_one(page, words):  # noqa: ARG001
    assert make_parser(COMMANDS).parse_args(words).command == words[0]


@pytest.mark.slow
def test_the_readmes_commands_run(tmp_path, monkeypatch, capsys):
    """As they stand, but for what would take hours: those train a small agent for a moment instead."""
    monkeypatch.chdir(tmp_path)
    small = ["network.hidden=8", "replay.batch_size=4", "schedule.learning_starts=60", "evaluation.episodes=1"]
    quick = ["--steps", "64", *(part for text in small for part in ("--set", text))]
    done = []
    for words in commands(ROOT / "README.md"):
        if words[0] == "train" and "--preset" not in words:  # CURL's learning starts later
            options = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
            assert main([words[0], "catch", *words[options:], *quick, "--overwrite"]) == 0, words
        elif words[0] == "evaluate":
            assert main([words[0], words[1].replace("pong", "catch"), "--episodes", "1"]) == 0, words
        elif words[0] == "watch":
            assert main([words[0], words[1].replace("pong", "catch"), "--steps", "3"]) == 0, words
        elif words[0] in ("report", "doctor") or "--dry-run" in words:
            assert main(words) == 0, words
        else:
            continue
        done.append(words[0])
    assert set(done) == {"train", "evaluate", "watch", "report", "sweep", "doctor"}
    assert (tmp_path / "report" / "index.html").is_file()
    assert "human" not in capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:tests|docs|src|results)/[\w./-]+\.\w+)", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists() or page.parent.name == "lab", name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_and_functions_that_pages_name_exist(page):
    diary = page.parent.name == "lab" or page.name == "CHANGELOG.md"  # may speak of what is gone
    names = re.findall(r"`(spr(?:\.\w+)+)", page.read_text(encoding="utf-8"))
    for name in [] if diary else names:
        assert pkgutil.resolve_name(name) is not None


def blocks(page):
    """A page's paragraphs and bullets, without code, tables, images and headings."""
    text = re.sub(r"^(```|:::).*?^\1.*?$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"\$\$.*?\$\$", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if block.strip() and not re.match(r"\s*(\||#|!\[|<!--|\()", block):
            yield block.strip()


@pytest.mark.parametrize("page", FOR_USERS, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_for_users_are_in_small_pieces(page):
    """No bullet of more than 60 words, no paragraph of more than four sentences."""
    for block in blocks(page):
        if re.match(r"([-*]|\d+\.) ", block):
            assert len(block.split()) <= 61, block
        else:
            plain = re.sub(r"`[^`]*`|\([^)]*\)|\d\.\d", "", block)
            assert len(re.findall(r"[.!?](?=\s|$)", plain)) <= 4, block


def test_the_readme_is_short():
    assert sum(len(block.split()) for block in blocks(ROOT / "README.md")) <= 900


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_reference_is_current(name):
    assert (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8") == reference.page(name), (
        "make reference"
    )


def test_every_pinned_package_but_torch_has_its_hashes():
    constraints = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()[1:]
    texts = [(ROOT / "requirements" / name).read_text() for name in ("run.txt", "dev.txt")]
    blocks = [block for text in texts for block in re.findall(r"^\S+==.*(?:\n    .*)+", text, re.MULTILINE)]
    checked = sorted(block.split()[0] for block in blocks)
    assert checked == sorted(pin for pin in constraints if not pin.startswith("torch=="))
    assert all(re.fullmatch(r"\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", block) for block in blocks)


def test_hashes_are_renewed_from_an_indexs_page(monkeypatch):
    renew = by_path(ROOT / "requirements" / "renew.py")
    files = {
        "some_thing-1.2-cp311-cp311-win_amd64.whl": True,
        "some_thing-1.2-cp314-cp314t-macosx_11_0_arm64.whl": True,
        "some_thing-1.2-cp38-abi3-manylinux_2_28_x86_64.whl": True,
        "some_thing-1.2.tar.gz": True,
        "some_thing-1.2-cp310-cp310-win_amd64.whl": False,  # no Python that this project runs on
        "some_thing-1.2.1-py3-none-any.whl": False,
        "some_thing-1.2.egg": False,
    }
    links = [f'<a href="../{name}#sha256={i:064x}" data-x="y">{name}</a>' for i, name in enumerate(files)]
    monkeypatch.setattr(renew, "urlopen", lambda _: io.BytesIO("<br>\n".join(links).encode()))
    assert renew.hashes("https://index/simple/", "some-thing", "1.2") == [
        f"{i:064x}" for i, used in enumerate(files.values()) if used
    ]
