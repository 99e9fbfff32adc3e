"""The keys that axolotl, LLaMA-Factory, TRL and transformers know, read from their sources: ``hetero_mpi/interop/known_keys.toml``.

    python benchmarks/tool_keys.py [--axolotl DIRECTORY] [--llamafactory DIRECTORY] [--write]

The directories are checkouts of axolotl-ai-cloud/axolotl and hiyouga/LLaMA-Factory, whose sources are parsed and not run. TRL and
transformers are the installed packages. Without ``--write``, print how many keys the file lacks or has too many.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from harness import parser_of  # noqa: E402

from hetero_mpi.util import toml  # noqa: E402

TARGET = ROOT / "hetero_mpi" / "interop" / "known_keys.toml"
AXOLOTL = {"axolotl": "AxolotlInputConfig", "axolotl.trl": "TRLConfig"}
"""Section of the file -> the class of axolotl whose fields it lists; plug-ins add ``*Args`` to the first."""
ENTRIES = (
    "SFTDataset",
    "DPODataset",
    "KTODataset",
    "PretrainingDataset",
    "StepwiseSupervisedDataset",
    "SyntheticDataset",
)
LLAMA_FACTORY = (
    "DataArguments", "ModelArguments", "FinetuningArguments", "GeneratingArguments", "RayArguments", "ProfilerArguments",
    "Fp8Arguments", "MegatronBridgeArguments", "_KTransformersRuntimeArguments",
)  # fmt: skip
TRL = ("SFTConfig", "DPOConfig", "KTOConfig", "ModelConfig", "ScriptArguments", "DatasetMixtureConfig")


def classes_in(paths: Iterable[Path]) -> dict[str, ast.ClassDef]:
    """Classes of the sources by name."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in sorted(paths))
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def fields_of(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """Names and aliases of the annotated fields of a class and of its bases among ``classes``."""
    if name not in classes:
        return set()
    found = set().union(*(fields_of(ast.unparse(base), classes) for base in classes[name].bases))
    for node in classes[name].body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "ClassVar" not in ast.unparse(node.annotation)
        ):
            found.add(node.target.id)
            keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
            found |= {str(ast.literal_eval(word.value)) for word in keywords if word.arg == "alias"}
    return {field for field in found if not field.startswith("_")}


def commit_of(directory: Path) -> str:
    """Commit of a checkout, shortened; "" without git."""
    done = subprocess.run(["git", "-C", directory, "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def axolotl_keys(directory: Path) -> dict[str, list[str]]:
    source = directory / "src" / "axolotl"
    plug_ins = classes_in(source.glob("integrations/*/args.py"))
    classes = classes_in(source.glob("utils/schemas/*.py"))
    sections = {section: fields_of(name, classes) for section, name in AXOLOTL.items()}
    sections["axolotl"] |= set().union(*(fields_of(name, plug_ins) for name in plug_ins if name.endswith("Args")))
    sections["entries"] = set().union(*(fields_of(name, classes) for name in ENTRIES))
    return {section: sorted(keys) for section, keys in sections.items()}


def llama_factory_keys(directory: Path) -> dict[str, list[str]]:
    classes = classes_in((directory / "src" / "llamafactory" / "hparams").glob("*.py"))
    return {"llamafactory": sorted(set().union(*(fields_of(name, classes) for name in LLAMA_FACTORY)))}


def installed_keys() -> dict[str, list[str]]:
    """Arguments of the installed packages; those of transformers are in a section of their own."""
    import trl
    from transformers import Seq2SeqTrainingArguments
    from trl.experimental import cpo, orpo

    shared = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if not field.name.startswith("_")}
    configs = [*(getattr(trl, name) for name in TRL), cpo.CPOConfig, orpo.ORPOConfig]
    keys = {field.name for config in configs for field in dataclasses.fields(config)} - shared
    return {"trainer": sorted(shared), "trl": sorted(keys)}


def written(keys: Mapping[str, Iterable[str]], sources: Mapping[str, str]) -> str:
    text = "# Keys that the tools of `init --from` know, written by benchmarks/tool_keys.py.\n\n[sources]\n"
    text += "".join(f'{tool} = "{source}"\n' for tool, source in sorted(sources.items())) + "\n[keys]\n"
    for section, names in sorted(keys.items()):
        text += f'"{section}" = [\n' + "".join(f'  "{name}",\n' for name in names) + "]\n"
    return text


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--axolotl", type=Path)
    parser.add_argument("--llamafactory", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    before = toml.loads(TARGET.read_text(encoding="utf-8")) if TARGET.exists() else {"keys": {}, "sources": {}}
    keys, sources = dict(before["keys"]) | installed_keys(), dict(before["sources"])
    sources |= {"trl": f"TRL {version('trl')}", "trainer": f"transformers {version('transformers')}"}
    if options.axolotl is not None:
        keys |= axolotl_keys(options.axolotl)
        sources["axolotl"] = f"axolotl-ai-cloud/axolotl {commit_of(options.axolotl)}"
    if options.llamafactory is not None:
        keys |= llama_factory_keys(options.llamafactory)
        sources["llamafactory"] = f"hiyouga/LLaMA-Factory {commit_of(options.llamafactory)}"
    news = {section: set(names) - set(before["keys"].get(section, ())) for section, names in keys.items()}
    for section, names in keys.items():
        gone = set(before["keys"].get(section, ())) - set(names)
        print(f"{section}: {len(names)} keys, new: {sorted(news[section])}, gone: {sorted(gone)}")
    if options.write:
        TARGET.write_text(written(keys, sources), encoding="utf-8")
    return int(options.check and any(news.values()))


if __name__ == "__main__":
    sys.exit(main())
