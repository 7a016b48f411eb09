"""All commands: their help, and what they refuse."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from commands import plain, run

import kvfold
from kvfold.cli import main
from kvfold.cli.output import collect_rows
from kvfold.fitted import Fitted
from kvfold.geometry import Geometry
from kvfold.models import EMBEDDED
from kvfold.recipes import parse

COMMANDS = (
    "doctor",
    "recipes",
    "plan",
    "calibrate",
    "tune",
    "fold",
    "inspect",
    "push",
    "pull",
    "eval",
    "check",
    "generate",
    "serve",
    "demo",
    "selftest",
    "bench kernels",
    "bench soak",
)


def test_version():
    assert run("--version").stdout == f"{kvfold.__version__}\n"


def test_help_names_every_command():
    shown = plain(run("--help").stdout)
    assert all(re.search(rf"\b{command.split()[0]}\b", shown) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_gives_an_example(command: str):
    assert re.search(rf"Example: kvfold {command}\b", plain(run(*command.split(), "--help").stdout))


@pytest.mark.parametrize(
    ("arguments", "light"),
    [
        (["--help"], ("pydantic",)),
        (["serve", "--help"], ()),  # typer itself loads pydantic for options
        (["recipes"], ()),
        (["plan", "Qwen3-8B", "--memory", "80GiB"], ()),
        (["plan", "{small}", "--memory", "80GiB"], ()),
    ],
    ids=lambda value: " ".join(value[:2]),
)
def test_what_starts_at_once_loads_no_torch(small: Path, arguments: list[str], light: tuple[str, ...]):
    words = [word.format(small=small) for word in arguments]
    code = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
    code += f"sys.argv = ['kvfold', *{words!r}]; from kvfold.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert done.stdout
    assert {"kvfold", "typer"} <= loaded
    assert loaded.isdisjoint(("torch", "transformers", "triton", "numba", "numpy", "scipy", "huggingface_hub", *light))


def test_kvfold_alone_shows_where_to_start():
    shown = plain(run().stdout)
    starts = re.findall(r"^  (kvfold .*?)(?:  |$)", shown, re.MULTILINE)
    assert {command.split()[1] for command in starts} == {"doctor", "demo", "plan", "check", "serve"}
    for command in starts:
        assert re.search(r"\bOptions\b", plain(run(command.split()[1], "--help").stdout))
    assert "kvfold --help" in shown
    assert max(map(len, shown.splitlines())) <= 80


# Completion, as shells ask for it


def completed(words: str, **environment: str) -> list[str]:
    code = "import sys; sys.argv = ['kvfold']; from kvfold.cli import main; main()"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1), "_TYPER_COMPLETE_ARGS": words}
    environment = {**os.environ, **asked, "_KVFOLD_COMPLETE": "complete_bash", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    return done.stdout.splitlines()


def test_completion_of_commands_options_recipes_and_examples():
    assert completed("kvfold pu") == ["push", "pull"]
    assert completed("kvfold bench so") == ["soak"]
    assert completed("kvfold check embedded --max-k") == ["--max-kl"]
    assert completed("kvfold serve embedded -r oscar") == ["oscar-int2"]
    assert completed("kvfold plan Llama-3") == ["Llama-3.1-8B"]
    fish = completed("kvfold plan Llama-3", _KVFOLD_COMPLETE="complete_fish", _TYPER_COMPLETE_FISH_ACTION="get-args")
    assert fish == ["Llama-3.1-8B"]
    assert completed("kvfold plan Llama-3", _KVFOLD_COMPLETE="complete_zsh") == [
        "_arguments '*: :((\"Llama-3.1-8B\"))'"
    ]


def test_completion_in_bash(tmp_path: Path):
    """The script that `kvfold --show-completion` prints, with a `kvfold` in the PATH."""
    program = tmp_path / "kvfold"
    program.write_text(f"#!{sys.executable}\nfrom kvfold.cli import main\nmain()\n")
    program.chmod(0o755)
    lines = (
        'eval "$(_KVFOLD_COMPLETE=source_bash kvfold)"',
        "complete -p kvfold",
        "COMP_WORDS=(kvfold serve embedded -r fold) COMP_CWORD=4",
        "_kvfold_completion kvfold",
        'echo "${COMPREPLY[*]}"',
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.splitlines() == ["complete -o default -F _kvfold_completion kvfold", "fold4 fold3 fold2 fold"]


def test_what_is_gained_is_said_alike_everywhere():
    """Of 16 bits: 4-bit integers to 2-bit integers with one group and their open block, at head dimension 128."""
    shape = Geometry.uniform("any", layers=1, q_heads=1, kv_heads=1, head_dim=128)
    bits = [Fitted(parse(name), shape).bits_per_element(131072) for name in ("saw-int4", "oscar-int2:group=128")]
    assert [f"{16 / each:.2g}" for each in bits] == ["3.8", "7"]
    root = Path(__file__).parents[2]
    said = [(root / file).read_text() for file in ("README.md", "pyproject.toml")]
    for text in (*said, kvfold.__doc__, " ".join(plain(run("--help").stdout).split())):
        assert "3.6 to 6.8 times smaller" in text
        assert "4 to 8 times" not in text


# Mistakes: one line, and before anything takes long


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serv"], "error: no such command 'serv'. Did you mean 'serve'? Run `kvfold --help`"),
        (["plan", "Qwen3-8B"], "error: missing option '--memory'. Run `kvfold plan --help`"),
        (["bench"], "error: missing command. Run `kvfold bench --help`"),
        (["recipes", "--head-dim", "many"], r"error: invalid value for '--head-dim': .*\. Run `kvfold recipes --help`"),
        (
            ["eval", "embedded", "--contxt", "9"],
            r"error: no such option.*--contxt.*--context.* Run `kvfold eval --help`",
        ),
        (
            ["calibrate", "embedded", "--out", "fits", "--seed", str(10**30)],
            "error: invalid value for '--seed': Input should be less than or equal to 9223372036854775807. Run "
            "`kvfold calibrate --help`",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_usage_is_explained_in_one_line(monkeypatch, capsys, arguments: list[str], line: str):
    monkeypatch.setattr(sys, "argv", ["kvfold", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    (said,) = plain(captured.err).splitlines()
    assert said == line or re.fullmatch(line, said)


def test_a_full_gpu_is_explained_in_one_line(error_of, monkeypatch):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore about it.")

    monkeypatch.setattr("kvfold.cli.command_recipes.fitting_recipes", full)
    line = error_of("recipes")
    assert line.startswith("error: the GPU's memory is full: give a shorter --context or fewer --tokens (CUDA out of")


@pytest.mark.parametrize("command", [("eval",), ("generate", "-p", "Hello")], ids=" ".join)
@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("saw-int5", "unknown recipe 'saw-int5': did you mean 'saw-int4'?"),
        ("int4:recent=256", "int4: recent= is gone: the tokens of the open block are read raw, so write block=64"),
    ],
)
def test_a_recipe_is_read_before_the_model(error_of, command: tuple[str, ...], recipe: str, message: str):
    """The model does not exist either; that the recipe is what is wrong shows that nobody went looking for it."""
    assert message in error_of(*command, "nobody/nothing", "-r", recipe)


def test_a_prompt_that_is_not_utf_8(error_of):
    """As Python hands on the byte 0xFF of a command line."""
    line = error_of("generate", "nobody/nothing", "-p", os.fsdecode(b"caf\xff"))
    assert line == "error: the prompt is not UTF-8: write --prompt in UTF-8"


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--memory", "1GB"),
        ("eval", "-r", "int4"),
        ("generate", "-p", "Hello"),
        ("calibrate", "--out", "means"),
        ("fold", "-r", "oscar-int2", "--out", "folded"),
    ],
    ids=lambda command: command[0],
)
def test_an_unknown_model(error_of, command: tuple[str, ...]):
    assert "nobody/nothing is neither 'embedded', a model folder" in error_of(*command, "nobody/nothing")


def test_a_recipe_that_does_not_fit_the_model(error_of, small: Path):
    assert "order=64 does not divide the head dimension 16" in error_of("eval", small, "-r", "saw-int4:order=64")
    assert "int4:skip=2: layer 2 cannot be skipped: the packed layers are 0, 1" in error_of(
        "generate", small, "-p", "Hello", "-r", "int4:skip=2"
    )
    line = error_of("eval", small, "-r", "saw-int4", "-r", "oscar-int2:group=1")
    assert line == "error: oscar-int2: group=1: 1 codes of 2 bits do not fill whole bytes"


def test_a_folder_that_is_no_artifact(error_of, tmp_path: Path):
    line = error_of("eval", "nobody/nothing", "-r", "int4", "--artifact", tmp_path)
    fix = f"make one with `kvfold calibrate MODEL --out {tmp_path}`"
    assert line == f"error: {tmp_path} is no artifact: there is no kvfold.json in it; {fix}"


def test_an_artifact_of_another_model(error_of, means: Path):
    line = error_of("generate", EMBEDDED, "-p", "Hello", "--artifact", means)
    assert "the artifact was made for another model: its layers is 2, the model's is 30" in line


COMMANDS_WITH_TARGETS = [
    *(("eval", "nobody/nothing", "-r", "int4", option) for option in ("--json", "--csv", "--html")),
    ("tune", "nobody/nothing", "--out", "new", "--bits", "3", "--json"),
    ("inspect", "nobody/nothing", "--json"),
    *(("bench", "kernels", option) for option in ("--json", "--csv")),
    ("check", "nobody/nothing", "--html"),
    ("demo", "--html"),
    ("doctor", "--json"),
    ("plan", "nobody/nothing", "--memory", "1GB", "--json"),
    ("recipes", "--json"),
    ("selftest", "--csv"),
]


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
@pytest.mark.parametrize(
    "words",
    [("eval", "nobody/nothing", "-r", "int4", "--html", "a"), ("check", "nobody/nothing", "--html", "a"), ("demo",)],
    ids=lambda words: words[0],
)
def test_a_page_that_cannot_be_written_is_refused_first(error_of, monkeypatch, library: str, words: tuple[str, ...]):
    monkeypatch.setitem(sys.modules, library, None)
    for name in ("drawings", "page"):
        monkeypatch.delitem(sys.modules, f"kvfold.evaluate.{name}", raising=False)
    assert error_of(*words) == f"error: the HTML page needs {library}: pip install 'kvfold[report]'"


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_missing_folder_is_named_before_the_model_is_loaded(error_of, tmp_path: Path, option: str):
    path = tmp_path / "missing" / "report"
    line = error_of("eval", "nobody/nothing", "-r", "int4", option, path)
    assert f"there is no folder {path.parent}" in line


@pytest.mark.parametrize("command", COMMANDS_WITH_TARGETS, ids=" ".join)
def test_a_folder_is_no_target(error_of, tmp_path: Path, command: tuple[str, ...]):
    """It is refused before anything is loaded, or looked for."""
    assert error_of(*command, tmp_path) == f"error: cannot write {tmp_path}: it is a folder; name a file in it"


def test_two_options_do_not_name_one_file(error_of, tmp_path: Path):
    file = tmp_path / "rows"
    line = error_of("eval", "nobody/nothing", "-r", "int4", "--json", file, "--csv", file)
    assert line == f"error: two options name {file}: name another file with one of them"


@dataclass
class Measured:
    case: int
    parts: list[int]


def test_rows_are_written_as_they_come(tmp_path: Path):
    json_file, csv_file = tmp_path / "rows.json", tmp_path / "rows.csv"
    for file in (json_file, csv_file):
        file.write_text("of an earlier run")

    def run(advance):
        assert csv_file.read_text() == "of an earlier run"
        yield Measured(1, [2])
        assert csv_file.read_text() == "case\n1\n"
        yield Measured(2, [])
        assert csv_file.read_text() == "case\n1\n2\n"
        assert json_file.read_text() == "of an earlier run"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect_rows("Measuring", run, str(json_file), csv_file)
    assert csv_file.read_text() == "case\n1\n2\n"
    assert json.loads(json_file.read_text()) == [{"case": 1, "parts": [2]}, {"case": 2, "parts": []}]


def test_a_text_that_is_missing_empty_or_short(error_of, small: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    assert f"cannot read the text {text}" in error_of("eval", small, "-r", "int4", "--text", text)
    text.write_text(" \n")
    assert f"{text} is empty" in error_of("calibrate", small, "--out", tmp_path / "means", "--text", text)
    text.write_text("Four words are few.")
    line = error_of("calibrate", small, "--out", tmp_path / "means", "--text", text)
    assert "the text has 19 tokens, fewer than the 8192 asked for" in line
    assert not (tmp_path / "means").exists()
