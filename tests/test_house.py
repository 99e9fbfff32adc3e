"""The house rules that a reader relies on: which package imports from which, how large a package may be, that a class has a name
of its own, and what the README says (more: test_docs.py).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hetero_mpi"
PACKAGES = [
    "util",
    "comm/ranks", "comm",
    "planning/types", "planning/orders", "planning",
    "planning/search", "planning/decision", "planning/analysis",
    "objectives",
    "job",
    "data", "data/formats",
    "device", "device/backends",
    "rundir", "rundir/trackers", "report", "report/figures", "report/page",
    "model/layer", "model/files", "model/transformers", "model/group", "model/custom", "model", "model/adapters",
    "profiling",
    "engine",
    "emulation",
    "state",
    "training/setup", "inference", "training",
    "commands", "commands/plug_ins",
    "serve/web", "serve", "inference/evaluate",
    "launch/hosts", "launch/launcher", "launch/supervisor", "launch/doctor", "launch",
    "interop",
]  # fmt: skip
"""Bottom to top; a package imports from itself and from those before it. Modules in the package's own folder, such as ``api`` and
``cli``, stand above all."""
LEAVES = ("serve", "inference/evaluate", "launch", "interop")
"""Packages that no other package imports: the command line finds their functions by name, so a folder can be deleted."""
LEAF_IMPORTS = {"interop/dataset_trainer": {"api", "step_iterator"}, "interop/trainer_events": {"step_iterator"}}
"""A leaf may use Python's interface, as a program does."""
MOST_FILES = 20
BANS = {
    "planning": {"torch", "mpi4py", "pydantic", "h5py", "transformers"},
    "comm": {"torch", "transformers"},
    "device": {"mpi4py"},
    "model": {"mpi4py"},
    "data": {"mpi4py", "torch"},
}
SOURCES = sorted(PACKAGE.rglob("*.py"))
MODULES = frozenset(
    path.relative_to(ROOT).with_suffix("").as_posix()
    for folder in ("hetero_mpi", "tests", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
)
"""Paths without suffix of all modules."""
SET_FROM_OUTSIDE = {
    r"(.+\.)?(current_action|activity\.\w+)": "whoever does something says what; the watchdog's thread reads it",
    r"world\.\w+": "a World learns of its peers after they have met, and of deaths in the MPI library's callbacks",
    r"(.+\.)?(_transport|inner)\.idle": "the transport is told during a wait that the processor has nothing to compute",
    r"history\.\w+": "what outlives an attempt is filled in while the attempt goes on",
    r"self\.clock\.current": "the benchmark's clock is told which layer it times",
    r"report\.\w+": "a tally of documents grows as they are read",
    r"ctx\.\w+": "torch.autograd.Function's context is made to be filled by forward",
    r"(.+\.)?(grad|data|training|forward|weight|bias|quant_state|recompute)": "tensors and modules of torch",
    r"(config|tokenizer|layer|parameter|sdpa_attention|masking_utils|self\.model)\.\w+": "objects of transformers and tokenizers",
    r"(module|embedding)\.(in_features|out_features|num_e\w+|padding_idx|_is_expert_parallel)": "layers shrink to a member's part",
    r"(torch|functional|products|mpi4py\.rc)\..+|sys\.excepthook|order\.flags\.writeable|.+\.atexit": "switches of libraries",
    r"error\.__(cause|suppress_context)__": "what Python itself shows of an exception",
}
"""Attributes that may be set on another object, and why. All others are whole once they are constructed."""
RECORDS = {"planning", "launch"}
"""Packages whose loops fill records of their own: of a search, and of the processes that are watched."""
Tree = Mapping[str, ast.Module]
"""Module ("comm/world") -> what stands in it."""


@cache
def tree_of(package: Path) -> Tree:
    return {
        path.relative_to(package).with_suffix("").as_posix(): ast.parse(path.read_text())
        for path in sorted(package.rglob("*.py"))
    }


def written(**sources: str) -> Tree:
    """A tree of made-up modules; ``__`` in a name stands for ``/``."""
    return {name.replace("__", "/"): ast.parse(source) for name, source in sources.items()}


def imported(module: ast.Module) -> Iterator[str]:
    """Dotted names, also those imported inside functions and for types only; of ``from a import b`` both a and a.b."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports_of_ours(module: ast.Module) -> tuple[str, ...]:
    return tuple(name for name in imported(module) if name.startswith("hetero_mpi."))


def own_imports(tree: Tree, module: str) -> set[str]:
    """The modules of the tree that ``module`` imports. The top, asked for the version, is none."""
    names = {name.partition(".")[2].replace(".", "/") for name in imports_of_ours(tree[module])}
    packages = {f"{name}/__init__" for name in names}
    deeper = {name.rpartition("/")[0] for name in names & set(tree)}
    # Of `from a import b`, with b a module, a itself is not meant.
    return ((names | {name for name in packages if name[:-9] not in deeper}) & set(tree)) - {module}


def package_of(module: str) -> str:
    return module.rpartition("/")[0]


def upward_imports(tree: Tree, order: Sequence[str]) -> list[str]:
    """Every import from a package that stands above, or that stands nowhere."""
    place = {package: number for number, package in enumerate(order)}
    wrong = [f"{package} is not in PACKAGES" for package in {package_of(module) for module in tree} - {*order, ""}]
    for module in tree:
        here = package_of(module)
        if here == "":
            continue  # stands above all
        for other in own_imports(tree, module) - LEAF_IMPORTS.get(module, set()):
            there = package_of(other)
            if there != here and not place.get(there, 99) < place.get(here, -1):
                wrong.append(f"{module} imports {other}")
    return wrong


def leaf_imports(tree: Tree) -> list[str]:
    """Every import of a leaf by a module outside of it that runs when the module is imported, or that belongs to a package."""
    wrong = []
    for module in tree:
        for other in own_imports(tree, module):
            leaf = next((leaf for leaf in LEAVES if other.startswith(f"{leaf}/")), None)
            outside = leaf is not None and not module.startswith(f"{leaf}/") and package_of(module) != ""
            if outside and not (module.startswith("inference/evaluate/") and leaf == "serve"):
                wrong.append(f"{module} imports {other}")
    return wrong


def circles(tree: Tree) -> list[list[str]]:
    """Modules that import each other, over however many steps."""
    reached = {module: own_imports(tree, module) - {"__init__"} for module in tree}
    grew = True
    while grew:
        grew = False
        for found in reached.values():
            further = set().union(*(reached[other] for other in found)) - found
            found |= further
            grew = grew or bool(further)
    inside = {module for module in tree if module in reached[module]}
    return sorted({tuple(sorted(other for other in reached[module] if module in reached[other])) for module in inside})


def too_large(tree: Tree) -> list[str]:
    sizes = [package_of(module) for module in tree if not module.endswith("__init__")]
    return [f"{package}: {sizes.count(package)} files" for package in set(sizes) if sizes.count(package) > MOST_FILES]


def classes_twice(tree: Tree) -> list[str]:
    places: dict[str, list[str]] = {}
    for module, source in tree.items():
        for node in source.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module)
    return [f"{name}: {', '.join(modules)}" for name, modules in places.items() if len(modules) > 1]


def set_on_others(tree: Tree) -> list[str]:
    """``module:line: target`` of every assignment to an attribute of anything but ``self`` and ``cls``."""
    found = []
    for module, content in tree.items():
        for node in ast.walk(content) if module.split("/")[0] not in RECORDS else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner, target = ast.unparse(node.value), ast.unparse(node)
                if owner not in ("self", "cls") and not any(re.fullmatch(one, target) for one in SET_FROM_OUTSIDE):
                    found.append(f"{module}:{node.lineno}: {target}")
    return found


tree_of(PACKAGE)  # parsed when tests are collected: no test here is charged for it


def test_packages_import_downward_only() -> None:
    assert upward_imports(tree_of(PACKAGE), PACKAGES) == []
    lazy = "def f():\n    from hetero_mpi.model.stage import Stage"
    for source in ("import hetero_mpi.model.stage", "from hetero_mpi.model import stage", lazy):
        found = upward_imports(written(comm__world=source, model__stage="", comm__transport=""), PACKAGES)
        assert found == ["comm/world imports model/stage"]
    assert upward_imports(written(comm__ranks__world="import hetero_mpi.comm.links", comm__links=""), PACKAGES)
    assert upward_imports(written(util__errors="import hetero_mpi.comm.links", comm__links=""), PACKAGES)
    assert upward_imports(written(comm__attic__old=""), PACKAGES) == ["comm/attic is not in PACKAGES"]


def test_no_package_imports_a_leaf() -> None:
    assert leaf_imports(tree_of(PACKAGE)) == []
    assert leaf_imports(written(train__loop="import hetero_mpi.serve.serve", serve__serve="")) != []


def test_no_modules_import_each_other() -> None:
    assert circles(tree_of(PACKAGE)) == []
    later = "if TYPE_CHECKING:\n    from hetero_mpi.comm.a import A"
    two = written(comm__a="def f():\n    from hetero_mpi.comm.b import B", comm__b=later)
    three = written(
        comm__a="import hetero_mpi.comm.b", comm__b="import hetero_mpi.comm.c", comm__c="from hetero_mpi.comm import a"
    )
    assert circles(two) == [("comm/a", "comm/b")] and circles(three) == [("comm/a", "comm/b", "comm/c")]
    assert circles(written(comm__a="import hetero_mpi.comm.b", comm__b="")) == []


def test_no_package_is_too_large() -> None:
    assert too_large(tree_of(PACKAGE)) == []
    assert too_large(written(**{f"comm__m{i}": "" for i in range(MOST_FILES + 1)})) == [f"comm: {MOST_FILES + 1} files"]


def test_a_class_has_a_name_of_its_own() -> None:
    assert classes_twice(tree_of(PACKAGE)) == []
    assert classes_twice(
        written(comm__a="class A: ...", comm__b="class A: ...\nclass _B: ...", data__c="class _B: ...")
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_package_imports_what_it_must_not(path: Path) -> None:
    tops = {name.partition(".")[0] for name in imported(ast.parse(path.read_text()))}
    assert not tops & BANS.get(path.relative_to(PACKAGE).parts[0], set())
    assert not tops & {"pickle", "dill", "cloudpickle"}


SLOW = ("matplotlib", "jinja2")
"""What draws: loaded where something is shown, never when a rank starts."""
DRAWING = ("figures", "page", "screen")
"""Modules of ``report`` that load it."""


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_draws_is_loaded_late(path: Path) -> None:
    if path.stem == "live_page" or ("report" in path.parts and {*path.parts, path.stem} & {*DRAWING}):
        return
    for node in ast.parse(path.read_text()).body:
        found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in found:
            assert name.split(".")[0] not in SLOW, f"{path.name} loads {name}"
            inside = name.startswith("hetero_mpi.report.") and name.split(".")[2] in DRAWING
            assert not inside, f"{path.name} loads {name} when it is imported itself"


def test_objects_are_complete_when_constructed() -> None:
    wrong = written(one="class A:\n def f(self, b):\n  self.x, b.y = 1, 2\n  b.grad = None\n  b.z += 1")
    assert set_on_others(wrong) == ["one:5: b.z", "one:3: b.y"]
    assert set_on_others(tree_of(PACKAGE)) == []


def test_readme_and_ci_run_the_same_tests() -> None:
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"<!-- test-command -->\n```sh\n(.*?)```", readme, re.DOTALL)
    assert block is not None and ".venv/bin/python -m pytest" in block[1]
    assert "<!-- test-command -->" in (ROOT / ".ci" / "run").read_text()


def test_families_in_the_readme_are_the_proven_ones() -> None:
    from hetero_mpi.model.transformers.families import PROVEN_FAMILIES

    found = re.search(r"of \[(\d+) proven families\]\(docs/models\.md\)", (ROOT / "README.md").read_text())
    assert found is not None and int(found[1]) == len(PROVEN_FAMILIES)


def test_files_are_replaced_and_disks_looked_at_in_one_place() -> None:
    for path in SOURCES:
        if path.name != "disk.py":
            assert not re.search(r"os\.replace\(|disk_usage", path.read_text()), path


def test_threads_begin_in_one_place() -> None:
    """``background`` says how they end, and who hears of their errors. The doctor's questions at once are an executor's."""
    for path in SOURCES:
        assert path.name == "background.py" or not re.search(
            r"\b(Thread|Timer)\(|start_new_thread", path.read_text()
        ), path


def prose(path: Path) -> Iterator[str]:
    """Docstrings, texts below attributes, and comments of a source."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def folders_and_ends(known: frozenset[str]) -> tuple[set[str], set[str]]:
    """Names of the folders of the paths in ``known``, and the ends of the paths, from any folder on."""
    folders = {name.rpartition("/")[0].rpartition("/")[2] for name in known}
    return folders, {"/".join(name.split("/")[place:]) for name in known for place in range(name.count("/") + 1)}


def absent_names(text: str, known: frozenset[str]) -> list[str]:
    """Files (``engine/trainer.py``) and modules (``engine.trainer.Trainer``) in ``text`` that are none of ``known``: paths without
    suffix, from the root or from a package."""
    folders, ends = folders_and_ends(known)
    files = [name for name in re.findall(r"(?<![\w/.*<{])((?:[\w-]+/)+[a-z_]\w*)\.py\b", text) if name not in ends]
    dotted = [name.removeprefix("hetero_mpi.").split(".") for name in re.findall(r"``((?:[a-z_]\w*\.)+\w+)", text)]
    own = [
        parts for parts in dotted if parts[0] in folders and len(parts) > 2
    ]  # two may be a key of a job, or a file's name
    return files + [
        ".".join(parts) for parts in own if not {"/".join(parts[:n]) for n in range(2, len(parts) + 1)} & ends
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_prose_names_modules_that_are_there(path: Path) -> None:
    known = MODULES
    assert absent_names("``engine.trainer`` in `engine/trainer.py`", known) == []
    assert absent_names("``engine.nobody.Trainer`` and `engine/nobody.py`", known) == [
        "engine/nobody",
        "engine.nobody.Trainer",
    ]
    assert not [name for text in prose(path) for name in absent_names(text, known)]


def test_docstrings_say_what_a_thing_is() -> None:
    """They begin with the thing: no question, and no "Of ..." or "What ..." that leans on the name above it."""
    asking = re.compile(r"(Of|What|Who|Is|Are|Does|By)\b|Do [^.]*\?")
    found = [
        f"{path.relative_to(PACKAGE)}: {docstring.splitlines()[0]}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (docstring := ast.get_docstring(node))
        if asking.match(docstring)
    ]
    assert not found
