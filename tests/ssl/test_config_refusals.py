import pytest

from nestling.ssl.command_line import read
from nestling.ssl.config import Config
from nestling.ssl.errors import UserError


@pytest.fixture
def configs(tmp_path):
    folder = tmp_path / "configs"
    folder.mkdir()
    (folder / "small.yaml").write_text("seed: 1\n")
    (folder / "medium.yaml").write_text("seed: 2\n")
    return folder


def refusal(*arguments, configs=None):
    with pytest.raises(UserError) as caught:
        read(Config, list(arguments), program="recipe.py", configs=configs)
    message = str(caught.value)
    assert "\n" not in message
    return message


REFUSED = {
    "resume=yes": ["resume=yes is not one of never, auto"],
    "optim.lrr=1": ["optim.lrr=1", "did you mean optim.lr?"],
    "lr=3": ["lr=3", "did you mean optim.lr?"],
    "optimizer.lr=3": ["optimizer.lr=3", "did you mean optim.lr?"],
    "+optim.lr=3": ["+optim.lr=3", "did you mean optim.lr?"],
    "optim.lr.x=3": ["optim.lr.x=3", "did you mean optim.lr?"],
    "terms.ibot.x=1": ["terms.ibot.x=1"],
    "config=small": ["write --config small"],
    "optim.lr=abc": ["optim.lr=abc", "a number of at least 0"],
    "optim.lr=-1": ["optim.lr=-1", "a number of at least 0"],
    "optim.lr=true": ["optim.lr=true", "a number"],
    "optim.lr=[1]": ["optim.lr=[1]", "a number"],
    "optim.lr=null": ["optim.lr=null", "a number"],
    "optim.lr=nan": ["optim.lr=nan", "finite"],
    "optim.lr=.inf": ["optim.lr=.inf", "finite"],
    "optim.lr=1e999": ["optim.lr=1e999", "finite"],
    "terms.dino=.nan": ["terms.dino=.nan", "finite"],
    "views.flip=1.5": ["views.flip=1.5", "from 0 to 1"],
    "train.epochs=0": ["train.epochs=0", "a whole number of at least 1"],
    "train.epochs=2.5": ["train.epochs=2.5", "a whole number"],
    "train.epochs=1e2": ["train.epochs=1e2", "a whole number", "write 100"],
    "train.epochs=true": ["train.epochs=true", "a whole number"],
    "seed=-1": ["seed=-1", "from 0 to 2147483647"],
    "head.batch_norm=1": ["head.batch_norm=1", "true or false"],
    "head.batch_norm=maybe": ["head.batch_norm=maybe", "true or false"],
    "optim.name=adm": ["optim.name=adm", "adamw, sgd, lars", "did you mean adamw?"],
    "knn.pooling=[cls, mean]": ["knn.pooling=[cls, mean]", "did you mean mean_patch?"],
    "data.start_method=thread": ["data.start_method=thread", "fork, spawn, forkserver, or null"],
    "data.train=null": ["data.train=null", "text"],
    "out=''": ["out=''", "empty"],
    "knn.k.0=5": ["knn.k.0=5", "a list is set whole, as in knn.k=[20, 10, 100, 200]"],
    "knn.k=5,10": ["knn.k=5,10", "knn.k=[5,10]"],
    "knn.k=[5,10": ["knn.k=[5,10", "whole numbers", "YAML"],
    "knn.k=[]": ["knn.k=[]", "a list of whole numbers"],
    "knn.k=[1, a]": ["knn.k=[1, a]", "whole numbers"],
    "knn.k=[0]": ["knn.k=[0]", "at least 1"],
    "knn.k={a: 1}": ["knn.k={a: 1}", "a list"],
    "views.global_scale=[.5, .2]": ["views.global_scale=[.5, .2]", "the first not above the second"],
    "views.local_scale=.5": ["views.local_scale=.5", "a list of 2 numbers"],
    "views.ratio=[1, 1, 1]": ["views.ratio=[1, 1, 1]", "a list of 2 numbers"],
    "views.blur_sigma=[2, 1]": ["views.blur_sigma=[2, 1]", "the first not above"],
    "views.global_blur=[1]": ["views.global_blur=[1]", "a list of 2 numbers from 0 to 1"],
    "views.global_solarize=[0, 2]": ["views.global_solarize=[0, 2]", "from 0 to 1"],
    "optim.betas=[.9]": ["optim.betas=[.9]", "a list of 2 numbers"],
    "terms=dino": ["terms=dino", "a mapping", "terms={dino: 1}"],
    "terms={dino: x}": ["terms.dino=x", "a number of at least 0"],
    "terms={dino: 1, dino: 2}": ["terms={dino: 1, dino: 2}", "twice"],
    "terms={a b: 1}": ["terms.a b", "letters"],
    "backbone.options={depth: {a: 1}}": ["backbone.options.depth"],
    "optim=3": ["optim=3", "optim is a section", "optim.lr", "optim.clip"],
    "train=/images": ["train is a section", "did you mean data.train=/images?"],
    "out=${nothing}": ["out=${nothing}", "nothing"],
    "out=${": ["out=${", "resolved"],
}  # fmt: skip


@pytest.mark.parametrize("argument", REFUSED)
def test_a_wrong_value_is_refused_by_name_with_what_would_work(argument):
    message = refusal(argument)
    assert [part for part in REFUSED[argument] if part not in message] == [], message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--optim.lr=1e-3", "write optim.lr=1e-3"),
        ("--optim.lr 1e-3", "write optim.lr=1e-3"),
        ("optim.lr 1e-3", "write optim.lr=1e-3"),
        ("optim.lr = 1e-3", "write optim.lr=1e-3"),
        ("optim.lr= 1e-3", "write optim.lr=1e-3"),
        ("optim.lr =1e-3", "write optim.lr=1e-3"),
        ("--lr 1e-3", "did you mean optim.lr=1e-3?"),
        ("--lr", "unexpected argument --lr"),
        ("hello world", "did you mean"),
        ("--epochs=3", "did you mean train.epochs=3?"),
        ("optim.lr= train.epochs=3", "optim.lr= has no value"),
        ("optim.lr", "optim.lr has no value"),
        ("optim.lr=", "optim.lr= has no value; write optim.lr=VALUE"),
        ("optim.lr=1 train.epochs=3 optim.lr=2", "optim.lr is given twice: optim.lr=1 and optim.lr=2"),
        ("/images", "unexpected argument /images"),
        ("--confg small", "unknown option --confg; did you mean --config?"),
        ("--config", "--config needs a name or a file"),
        ("--config train.epochs=3", "--config needs a name or a file"),
        ("--config small --config medium", "--config is given twice"),
        ("--config smal", "--config smal is unknown; the nearest are small, medium"),
        ("--config nothing.yaml", "config nothing.yaml can't be read: No such file"),
        ("--config .", "config . can't be read"),
    ],
)  # fmt: skip
def test_a_wrong_spelling_is_refused_with_the_right_one(line, expected, configs):
    if line == "--config .":
        line = f"--config {configs}/"
        expected = "can't be read: Is a directory"
    assert expected in refusal(*line.split(" "), configs=configs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("optim:\n  lrr: 1\n", ":2: unknown key optim.lrr=1; did you mean optim.lr?"),
        ("\noptimizer:\n  lr: 1\n", ":2: unknown key optimizer; did you mean optim?"),
        ("optim:\n  lr: abc\n", ":2: optim.lr=abc is not a number"),
        ("optim:\n  betas:\n    - .9\n    - 2\n", ":2: optim.betas=- .9 - 2 is not a list of 2 numbers"),
        ("optim: 3\n", ":1: optim=3: optim is a section"),
        ("optim:\n  lr: 1\n  lr: 2\n", ":3: optim.lr is given twice"),
        ("optim.lr: 3\n", ":1: optim.lr must be nested in a YAML: optim: {lr: 3}"),
        ("out:\n", ":1: out= is not text"),
        ("out: {a: b}\n", ":1: out={a: b} is not text"),
        ("out: [a]\n", ":1: out=[a] is not text"),
        ("terms:\n  dino: x\n", ":1: terms.dino=x is not a number"),
        ("? [a]\n: 3\n", ":1: unknown key [...]=3"),
        ("seed: 1\nout: [a\nseed: 2\n", " is not YAML: "),
        ("seed: 1\n---\nseed: 2\n", ":2 is not YAML: "),
        ("a: \x00\n", " is not YAML: "),
        ("- a\n", " is not a mapping"),
        ("text\n", " is not a mapping"),
        ("data:\n  train: ???\n", "data.train is missing; add data.train=VALUE"),
    ],
)  # fmt: skip
def test_a_wrong_yaml_is_refused_with_file_and_line(text, expected, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    message = refusal("--config", str(path))
    assert expected in message
    assert message.startswith(str(path)) or "missing" in message


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"x": "seed: 1\nbase: y\n"}, "x.yaml:2: base=y: there is no "),
        ({"x": "base:\n"}, "x.yaml:1: base=: there is no "),
        ({"x": "base: x\n"}, "x.yaml:1: base=x leads back to "),
        ({"x": "base: y\n", "y": "base: x.yaml\n"}, "y.yaml:1: base=x.yaml leads back to "),
        ({"x": "base: y\n", "y": "optim:\n  lrr: 1\n"}, "y.yaml:2: unknown key optim.lrr=1"),
        ({"x": "base: {a: b}\n"}, "x.yaml:1: base="),
    ],
)
def test_a_base_that_cannot_be_used_is_refused_with_file_and_line(files, expected, tmp_path):
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    message = refusal("--config", str(tmp_path / "x.yaml"))
    assert expected in message
    assert "\n" not in message


def test_a_yaml_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"out: \xff\n")
    assert "is not UTF-8" in refusal("--config", str(tmp_path / "x.yaml"))
