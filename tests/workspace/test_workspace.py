"""The workspace: strict names, caps, exact edits, and no way to the host's files."""

import pytest

from ai_trains_ai.errors import WorkspaceError
from ai_trains_ai.workspace import MAX_FILE_BYTES, MAX_FILES, Workspace, check_path

HOSTILE = [
    *("", ".", "..", "../x", "a/../x", "/etc/passwd", "a//b", "a/", "./a", "~/x", "~root", "a\\b", "C:\\x", "c:x"),
    *("a\0b", "a\nb", "a\tb", " a", "a ", "a.", "-rf", "--help", "a b", "$HOME", "%2e%2e", "a%2fb", "a:b", "a*", "'x'"),
    *("ü.py", "ｅnv.py", "‮gpj.py", "e\u0301.py", "\ud800.py", "．．/x", "a;b", "a|b"),
    *(".git", ".git/config", ".env", ".ssh/id_rsa", "sitecustomize.py", "usercustomize.py", "conftest.py"),
    *(
        "tests/conftest.py",
        "x.pth",
        "X.PTH",
        "x.so",
        "__pycache__/x.pyc",
        "w.pkl",
        "model.pt",
        "a.zip",
        "con",
        "NUL.txt",
    ),
    *("com1.py", "a/b/c/d/e/f/g", "x" * 201, "y" * 65),
]


@pytest.mark.parametrize("path", HOSTILE, ids=ascii)
def test_a_hostile_name_is_refused_by_every_operation(path):
    workspace = Workspace({"environment.py": b"x"})
    for operation in (
        lambda: workspace.read(path),
        lambda: workspace.write(path, "x"),
        lambda: workspace.edit(path, "x", "y"),
        lambda: Workspace({path: b""}),
    ):
        with pytest.raises(WorkspaceError):
            operation()


@pytest.mark.parametrize("path", [None, 3, b"a", ["a"]])
def test_a_name_that_is_no_text_is_refused(path):
    with pytest.raises(WorkspaceError):
        check_path(path)


@pytest.mark.parametrize("path", ["environment.py", "guide/reference.md", "a/__init__.py", "notes-2.txt", "_x"])
def test_a_plain_name_is_accepted(path):
    assert check_path(path) == path


def test_a_change_gives_a_new_workspace_and_leaves_the_old_one():
    old = Workspace({"a.txt": b"one"})
    new = old.write("b.txt", "zwei ü")
    assert (old.list_files(), new.list_files()) == (["a.txt"], ["a.txt", "b.txt"])
    assert new.read("b.txt") == "zwei ü"
    with pytest.raises(TypeError):
        new.files["c.txt"] = b""


def test_the_mapping_that_was_passed_in_is_copied():
    files = {"a.txt": b"one"}
    workspace = Workspace(files)
    files["../x"] = b""
    assert workspace.list_files() == ["a.txt"]


@pytest.mark.parametrize(("text", "count"), [("a b a", 2), ("b", 0), ("", 0)])
def test_an_edit_needs_exactly_one_match(text, count):
    with pytest.raises(WorkspaceError, match=f"occurs {count} times"):
        Workspace({"a.txt": text.encode()}).edit("a.txt", "a", "c")


def test_an_edit_replaces_its_match():
    assert Workspace({"a.txt": b"x = 1\n"}).edit("a.txt", "1", "2").read("a.txt") == "x = 2\n"


def test_an_empty_old_text_is_refused():
    with pytest.raises(WorkspaceError):
        Workspace({"a.txt": b"x"}).edit("a.txt", "", "y")


def test_read_only_files_can_be_read_and_not_changed():
    workspace = Workspace({"TASK.md": b"do"}, frozenset({"TASK.md"}))
    assert workspace.read("TASK.md") == "do"
    for change in (lambda: workspace.write("TASK.md", "x"), lambda: workspace.edit("TASK.md", "do", "x")):
        with pytest.raises(WorkspaceError, match="read-only"):
            change()


def test_a_missing_file_is_named_with_those_that_exist():
    with pytest.raises(WorkspaceError, match=r"no such file\. Files: a\.txt"):
        Workspace({"a.txt": b""}).read("b.txt")


@pytest.mark.parametrize(
    "files",
    [
        {f"f{n}": b"" for n in range(MAX_FILES + 1)},
        {"a": b"x" * (MAX_FILE_BYTES + 1)},
        {f"f{n}": b"x" * MAX_FILE_BYTES for n in range(9)},
        {"a": b"", "a/b": b""},
        {"A.py": b"", "a.py": b""},
    ],
    ids=["count", "size", "total", "file and folder", "case"],
)
def test_caps_and_clashes_are_refused(files):
    with pytest.raises(WorkspaceError):
        Workspace(files)


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(WorkspaceError):
        Workspace().write("a.txt", "\ud800")


def test_a_merge_takes_what_is_allowed_and_says_what_is_not():
    workspace = Workspace({"TASK.md": b"do"}, frozenset({"TASK.md"}))
    merged, refused = workspace.merge({"out.txt": b"1", "TASK.md": b"x", "../up": b"x", "sitecustomize.py": b""})
    assert merged.list_files() == ["TASK.md", "out.txt"]
    assert merged.read("TASK.md") == "do"
    assert len(refused) == 3


def test_a_submission_is_the_named_files_that_exist():
    workspace = Workspace({"environment.py": b"e", "job.toml": b"j", "notes.txt": b"n"})
    assert workspace.submission() == {"environment.py": b"e", "job.toml": b"j"}
