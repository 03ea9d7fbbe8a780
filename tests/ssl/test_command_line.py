import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nestling.ssl.command_line import read, run, write
from nestling.ssl.config import Config, Knn, key
from nestling.ssl.errors import UserError
from nestling.ssl.keys import MISSING, keys_of, legal, show
from nestling.ssl.settings import check_values


@pytest.fixture
def configs(tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "small.yaml").write_text(
        "# a comment\noptim:\n  lr: 1e-3\n  betas: [.8, .9]\ntrain: {epochs: 7}\n"
    )
    (folder / "medium.yaml").write_text("terms: {ibot: 2}\n")
    return folder


def parse(*arguments, configs=None, **more):
    return read(Config, list(arguments), program="recipe.py", configs=configs, **more)


def test_nothing_given_means_the_defaults_of_the_schema():
    assert parse() == Config()


def test_the_yaml_wins_over_defaults_and_arguments_win_over_the_yaml(configs):
    config = parse("--config", "small", "train.epochs=9", configs=configs)
    assert config.optim.lr == 1e-3
    assert config.train.epochs == 9
    assert config.optim.weight_decay == Config().optim.weight_decay
    assert parse("train.epochs=9", "--config=small", configs=configs) == config
    assert parse("--config", str(configs / "small.yaml"), "train.epochs=9") == config
    assert parse("--config", "small.yaml", "train.epochs=9", configs=configs) == config


def test_the_default_config_is_a_name_or_a_choice_made_from_the_arguments(configs):
    def choose(given):
        return "medium" if given.get("data.train") == "/images" else None

    assert parse(configs=configs, default="small").train.epochs == 7
    assert parse("--config", "medium", configs=configs, default="small").train.epochs == 100
    assert parse("data.train=/images", configs=configs, default=choose).terms == {"ibot": 2}
    assert parse("data.train=/others", configs=configs, default=choose).terms == {"dino": 1}


def test_lists_and_whole_mappings_are_replaced_and_single_entries_added(configs):
    assert parse("--config", "small", configs=configs).optim.betas == [0.8, 0.9]
    assert parse("--config", "small", "optim.betas=[.1,.2]", configs=configs).optim.betas == [0.1, 0.2]
    assert parse("--config", "medium", configs=configs).terms == {"ibot": 2}
    assert parse("terms={ibot: 3}").terms == {"ibot": 3}
    assert parse("terms.ibot=1").terms == {"dino": 1, "ibot": 1}
    assert parse("terms={ibot: 3}", "terms.koleo=.1").terms == {"ibot": 3, "koleo": 0.1}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("optim.lr=1e-3", 0.001),
        ("optim.lr=3", 3.0),
        ("optim.lr=.5", 0.5),
        ("knn.max_train=100_000", 100_000),
        ("knn.k=5", [5]),
        ("knn.k=[5, 10]", [5, 10]),
        ("knn.pooling=mean_patch", ["mean_patch"]),
        ("log.trackers=[]", []),
        ("head.batch_norm=true", True),
        ("head.batch_norm=off", False),
        ("out=no", "no"),
        ("out=1e-3", "1e-3"),
        ("out=a: b, [c # d", "a: b, [c # d"),
        ("out=lr=1", "lr=1"),
        ("out={a: b}", "{a: b}"),
        ("out='null'", "null"),
        ("out=~/runs", "~/runs"),
        ("optim.clip_mode=none", "none"),
        ("data.val=null", None),
        ("data.val=/images", "/images"),
        ("knn.size=null", None),
        ("data.num_workers=0", 0),
        ("backbone.options={depth: 4, stem: linear, qkv_bias: false, x: 1e-5}",
         {"depth": 4, "stem": "linear", "qkv_bias": False, "x": 1e-5}),
        ("out=runs/${backbone.name}", "runs/xcit_small_12_p16"),
    ],
)  # fmt: skip
def test_a_value_is_read_by_the_type_of_its_key(argument, value, tmp_path):
    name = argument.partition("=")[0]
    config = parse(argument)
    found = OmegaConf.select(OmegaConf.structured(dataclasses.asdict(config)), name)
    found = OmegaConf.to_container(found) if OmegaConf.is_config(found) else found
    assert found == value
    assert type(found) is type(value)
    check_values(config)


def test_a_yaml_reads_bare_words_by_the_type_of_their_key(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "out: no\noptim: {clip_mode: none, lr: 1e-3}\nhead: {batch_norm: yes}\ndata:\n  # all defaults\n"
    )
    config = parse("--config", str(path))
    assert (config.out, config.optim.clip_mode, config.optim.lr, config.head.batch_norm) == (
        "no",
        "none",
        1e-3,
        True,
    )


def test_a_yaml_starts_from_the_one_it_names_as_its_base(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "seed: 1\noptim: {lr: 1, lr_end: 2}\nbackbone: {options: {depth: 4, patch: 8}}\n"
    )
    (tmp_path / "b.yaml").write_text("optim: {lr: 3}\nbase: a\n")
    (tmp_path / "c.yaml").write_text("base: b.yaml\nbackbone: {options: {window: 7}}\n")
    config = parse("--config", str(tmp_path / "c.yaml"), "seed=5")
    assert (config.seed, config.optim.lr, config.optim.lr_end) == (5, 3, 2)
    assert config.backbone.options == {"window": 7}, "mappings are replaced whole, as by arguments"


def test_a_yaml_may_build_on_a_config_of_the_recipes(configs, tmp_path):
    (tmp_path / "mine.yaml").write_text("base: small\nseed: 7\n")
    mine = parse("--config", str(tmp_path / "mine.yaml"), configs=configs)
    assert mine == dataclasses.replace(parse("--config", "small", configs=configs), seed=7)


def test_an_empty_yaml_means_the_defaults(tmp_path):
    (tmp_path / "x.yaml").write_text("# nothing\n")
    assert parse("--config", str(tmp_path / "x.yaml")) == Config()


def test_a_value_that_must_be_given_is_accepted_once_given(tmp_path):
    (tmp_path / "x.yaml").write_text("data:\n  train: ???\n")
    assert parse("--config", str(tmp_path / "x.yaml"), "data.train=/images").data.train == "/images"


@pytest.mark.parametrize(
    "text",
    ["no", "null", "~", "1e-3", "007", " padded ", "a: #b", "ünï", "${x}", r"\${x}", r"a\\${x", "x\ny"],
)  # fmt: skip
def test_a_written_config_reads_back_the_same(text, tmp_path):
    config = parse("optim.lr=1e-7", "knn.k=3", "terms.ibot=.1", "views.ratio=[.7, 1.4285714285714286]")
    config.out = config.data.val = text
    config.backbone.options = {"depth": 4, "stem": text, "sizes": [1, 2], "flag": False, "scale": 1e-5}
    write(config, tmp_path / "config.yaml")
    again = parse("--config", str(tmp_path / "config.yaml"))
    assert again == config
    assert [type(value) for value in again.backbone.options.values()] == [int, str, list, bool, float]


def test_a_written_config_is_what_omegaconf_itself_reads(tmp_path):
    config = parse("optim.lr=1e-7", "out=no", "views.global_size=[192, 224]")
    write(config, tmp_path / "config.yaml")
    loaded = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(tmp_path / "config.yaml"))
    assert OmegaConf.to_object(loaded) == config


def test_a_config_made_in_python_is_checked_as_well():
    config = Config()
    check_values(config)
    config.optim.lr = float("nan")
    with pytest.raises(UserError, match=r"optim\.lr=nan is not a number"):
        check_values(config)
    with pytest.raises(UserError, match=r"terms\.dino=-1 is not a number of at least 0"):
        check_values(Config(terms={"dino": -1}))


@pytest.mark.parametrize("columns", [80, 100])
def test_help_prints_every_key_with_default_legal_values_and_meaning(columns, configs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        parse("optim.lr=broken", "--help", configs=configs, about="What it\ndoes.\n\n    python recipe.py\n")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    joined = " ".join(text.split())
    assert "What it does.\n\n    python recipe.py\n" in text
    assert "one of medium, small, or a YAML file" in joined
    for name, leaf in keys_of(Config).items():
        assert leaf.meaning, f"{name} has no meaning"
        default = "" if leaf.default == MISSING else show(leaf.default)
        assert " ".join(f" {name}={default} {legal(leaf)} {leaf.meaning} ".split()) in joined
        assert " ".join(leaf.meaning.split()) in joined
    assert re.search(r"optim\.lr=0\.0005 +a number of at least 0 ", joined)
    assert re.search(r"optim\.name=adamw +one of adamw, sgd, lars ", joined)


@dataclasses.dataclass
class Judge:
    """Judges one checkpoint."""

    checkpoint: str = key("???", "the checkpoint's folder")
    sizes: list[int] | None = key(None, "sides of the image", low=1)
    split: str = key("val", "which images", choices=("train", "val"))
    knn: Knn = dataclasses.field(default_factory=Knn)


def judge(*arguments):
    return read(Judge, list(arguments), program="judge.py", positional=["checkpoint"])


@pytest.mark.parametrize(
    "line", ["runs/lr=1/last knn.k=7", "knn.k=7 runs/lr=1/last", "checkpoint=runs/lr=1/last knn.k=7"]
)
def test_a_positional_argument_sets_its_key(line):
    config = judge(*line.split())
    assert (config.checkpoint, config.knn.k, config.split) == ("runs/lr=1/last", [7], "val")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "checkpoint is missing; add CHECKPOINT: the checkpoint's folder"),
        ("a b", "unexpected argument b"),
        ("a checkpoint=b", "checkpoint is given twice: checkpoint=a and checkpoint=b"),
        ("knn.k 7", "write knn.k=7"),
        ("a sizes=[]", "sizes=[] is not a list of whole numbers of at least 1, or null"),
        ("a knn.kk=7", "did you mean knn.k?"),
        ("a --config foo", "--config foo is not a YAML file"),
    ],
)  # fmt: skip
def test_a_wrong_positional_argument_is_refused(line, expected):
    with pytest.raises(UserError, match=re.escape(expected)):
        judge(*line.split())


def test_help_names_positional_arguments(capsys):
    with pytest.raises(SystemExit):
        judge("--help")
    assert "usage: judge.py CHECKPOINT [" in capsys.readouterr().out


SCRIPT = """
import sys
from nestling.ssl.command_line import read, run
from nestling.ssl.config import Config

def main(argv):
    config = read(Config, argv, program="script.py")
    assert "torch" not in sys.modules, "torch was imported to read a command line"
    print(config.optim.lr)

if __name__ == "__main__":
    run(main)
"""


def test_a_mistake_ends_a_script_with_one_line_and_code_2(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def call(argument, **environment):
        command = [sys.executable, str(script), argument]
        root = str(Path(__file__).parents[2])
        env = {"PYTHONPATH": root, "PATH": "", **environment}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        return done.returncode, done.stdout, done.stderr

    assert call("optim.lr=1e-3") == (0, "0.001\n", "")
    assert call("optim.lrr=1") == (2, "", "error: unknown key optim.lrr=1; did you mean optim.lr?\n")
    said = "process 1: error: unknown key optim.lrr=1; did you mean optim.lr?\n"
    assert call("optim.lrr=1", RANK="1") == (2, "", said), "a launcher would have ended it by then"


def test_control_c_ends_a_script_with_one_line_and_code_130(capsys):
    def main(argv):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run(main, [])
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_fault_of_our_own_keeps_its_traceback():
    def main(argv):
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        run(main, [])
