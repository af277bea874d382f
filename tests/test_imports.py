"""The import table of docs/architecture.md, checked on the sources; and what must stay light."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import PurePath

from docs import rooms

PACKAGES = rooms.PACKAGES
# By the module's name without `zerotune.`: what must not be loaded there.
BANNED = {
    "store": {"torch", "zmq", "sklearn", "scipy"},
    "agent": {"sklearn", "sqlite_utils", "scipy", "skops", "pandas"},
    "agent/launch.py": {"torch"},
    "zero_runtime": {"zmq", "msgspec", "sqlite_utils", "sklearn", "numpy"},
    "tuner": {"torch"},
}
MAY_LOAD_TORCH = {"tuner/offline/sweep/worker.py"}
NEWER_THAN_PYTHON_3_10 = {
    *(f"typing.{name}" for name in ("Self", "Never", "LiteralString", "Required", "NotRequired", "Unpack", "override")),
    *(f"typing.{name}" for name in ("TypeVarTuple", "assert_never", "assert_type", "reveal_type")),
    *("enum.StrEnum", "enum.verify", "datetime.UTC", "contextlib.chdir", "itertools.batched", "hashlib.file_digest"),
}
"""What the oldest Python that we promise does not have; the agent would stay off there."""
MAX_FILES = 18
"""Files of one folder at most, the largest of today, to shrink to 15: more nobody searches through."""
WRITTEN_BY_HAND = {".py", ".c", ".h", ".md", ".toml", ".csv", ".j2"}


def relative(path):
    return str(path.relative_to(rooms.ROOT))


def test_rooms_import_what_the_table_allows():
    assert list(rooms.trespasses()) == []


def test_no_module_imports_itself_through_others():
    assert rooms.circles() == []


def test_no_module_is_loaded_under_two_names():
    suspect = re.compile(rf"\b(?:from|import) +(?:{'|'.join(PACKAGES)})\b")
    wrong = [
        f"{path}: {name}"
        for folder in (*PACKAGES, "benchmarks", "tests")
        for path in (rooms.ROOT / folder).rglob("*.py")
        if suspect.search(path.read_text())
        for name in rooms.names_imported(relative(path))
        if name.partition(".")[0] in PACKAGES
    ]
    assert wrong == []


def test_rooms_of_the_store_build_on_each_other():
    may = {"rows": (), "damage": ("rows",), "writing": ("rows", "damage"), "reading": ("rows", "damage")}
    wrong = [
        f"{file} imports {one}"
        for file in rooms.files()
        for one in rooms.imports(file)
        for name, others in may.items()
        if file.startswith(f"store/sqlite/{name}/")
        and one.startswith("store/sqlite/")
        and one.count("/") > 2
        and one.split("/")[2] not in (name, *others)
    ]
    assert wrong == []


def test_the_page_shows_the_rooms_as_they_are():
    assert rooms.PAGE.read_text() == rooms.page(), "run python docs/rooms.py"
    assert rooms.PICTURE.read_text() == rooms.picture(), "run python docs/rooms.py"


def test_third_party_stays_where_it_belongs():
    wrong = []
    for file in rooms.files():
        places = [names for place, names in BANNED.items() if file == place or file.startswith(place + "/")]
        banned = set().union(*places) - ({"torch"} if file in MAY_LOAD_TORCH else set())
        names = rooms.names_imported(file, lazy=not file.startswith("tuner/"))
        wrong += [f"{file} imports {name}" for name in names if name.split(".")[0] in banned]
    assert wrong == []


def test_nothing_is_imported_that_the_oldest_python_lacks():
    used = {name for file in rooms.files() for name in rooms.names_imported(file)}
    assert "typing.Final" in used
    assert used & NEWER_THAN_PYTHON_3_10 == set()


def loaded_after(statement):
    code = f"import sys; {statement}; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=rooms.ROOT)
    return set(done.stdout.split())


def test_agent_is_light():
    loaded = loaded_after("import zerotune.agent.session, zerotune.agent.activate")
    assert not loaded & {
        "sklearn",
        "scipy",
        "sqlite3",
        "sqlite_utils",
        "zerotune.zero_runtime",
        "zerotune.tuner",
        "matplotlib",
    }


def test_reading_a_store_imports_no_migrations(tmp_path):
    opened = "from zerotune.store.sqlite.database import Store; Store.open({!r}, read_only={}).close()"
    path = str(tmp_path / "store.db")
    assert "sqlite_utils" in loaded_after(opened.format(path, False))
    assert "sqlite_utils" not in loaded_after(opened.format(path, True))


def test_command_line_loads_no_torch():
    loaded = loaded_after("import zerotune.tuner.cli, zerotune.agent.launch")
    assert not loaded & {"torch", "sklearn", "scipy", "sqlite_utils", "matplotlib", "google"}


def test_every_import_of_the_tests_exists():
    """In tests that are rarely run, too; mypy looks at all else."""
    folders = {"zerotune": rooms.ROOT / "zerotune", "benchmarks": rooms.ROOT / "benchmarks"}
    wrong = []
    for path in (rooms.ROOT / "tests").rglob("*.py"):
        for name in rooms.names_imported(relative(path)):
            top, *parts = name.split(".")
            at = folders.get(top)
            while at and parts and not (at / f"{parts[0]}.py").exists() and (at / parts[0]).is_dir():
                at /= parts.pop(0)
            if not at or not parts or (at / f"{parts[0]}.py").exists():
                continue
            front = at / "__init__.py"  # what it does not have a module for it must say itself
            if len(parts) > 1 or not re.search(rf"\b{parts[0]}\b", front.read_text() if front.exists() else ""):
                wrong.append(f"{path}: {name}")
    assert wrong == []


def test_folders_are_small():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=rooms.ROOT).stdout.splitlines()
    files = {PurePath(name) for name in listed if (rooms.ROOT / name).is_file()}
    sizes = Counter(str(file.parent) for file in files if file.suffix in WRITTEN_BY_HAND)
    assert sizes["tuner/service"] > 0
    assert {folder: size for folder, size in sizes.items() if size > MAX_FILES} == {}
