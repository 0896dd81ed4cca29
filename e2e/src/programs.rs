//! Programs that users run on a volume, as shell scripts: the current folder is an empty one on the volume, `$local` one on a
//! local file system. A script fails if something is not as on a local file system.

/// How the volume of a program is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    /// With the driver's default options, or with `posix`.
    Any,
    /// With `posix`: the program needs owners and modes for each file.
    Posix,
    /// With `nobrl`: locks of byte ranges stay on the node.
    LocalLocks,
}

/// A program and what it does.
#[derive(Debug, Clone, Copy)]
pub struct Program {
    /// Its name.
    pub name: &'static str,
    /// The mounts it works on.
    pub mounts: Mounts,
    /// Takes a minute on an emulated node.
    pub slow: bool,
    /// The script.
    pub work: &'static str,
    /// A script for another node that has the same folder, after `work`.
    pub check: &'static str,
}

/// All of them.
pub const PROGRAMS: &[Program] = &[
    Program { name: "git clone", mounts: Mounts::Any, slow: true, work: GIT, check: GIT_CHECK },
    Program {
        name: "python -m venv, pip install",
        mounts: Mounts::Any,
        slow: true,
        work: VENV,
        check: VENV_CHECK,
    },
    Program { name: "Hugging Face cache", mounts: Mounts::Any, slow: false, work: HUB, check: HUB_CHECK },
    Program { name: "tar --xattrs", mounts: Mounts::Any, slow: false, work: TAR, check: TAR_CHECK },
    Program { name: "sqlite3", mounts: Mounts::Any, slow: true, work: SQLITE, check: SQLITE_CHECK },
    Program {
        name: "sqlite3 with locks of the node",
        mounts: Mounts::LocalLocks,
        slow: true,
        work: SQLITE_LOCAL,
        check: SQLITE_LOCAL_CHECK,
    },
    Program { name: "rsync -aHAX", mounts: Mounts::Posix, slow: false, work: RSYNC, check: RSYNC_CHECK },
];

const GIT: &str = r#"
export GIT_CONFIG_GLOBAL=$local/gitconfig
git config --global user.name lab; git config --global user.email lab@example.org
git config --global --add safe.directory '*'
git init -q -b main "$local/origin"
cd "$local/origin"
for folder in a b c d; do
    mkdir $folder
    for number in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
        head -c $((number * 900)) /dev/urandom > $folder/$number
    done
done
printf '#!/bin/sh\n' > a/tool; chmod +x a/tool; ln -s a/tool tool
git add . && git commit -qm one
echo change >> a/1; git mv a/2 moved
git commit -qam two; git tag v1; git branch other
cd "$OLDPWD"
git clone -q --no-hardlinks "$local/origin" clone
cd clone
git fsck --full --strict
test "$(git rev-parse HEAD)" = "$(git -C "$local/origin" rev-parse HEAD)"
test -z "$(git status --porcelain)"
git gc -q; git checkout -q -b new HEAD~1; git commit -q --allow-empty -m three; git checkout -q main
git fsck --full --strict
test -z "$(git status --porcelain)"
diff -r --no-dereference --exclude=.git "$local/origin" .
"#;

const GIT_CHECK: &str = r#"
export GIT_CONFIG_GLOBAL=$local/gitconfig
git config --global --add safe.directory '*'
cd clone
git fsck --full --strict
test -z "$(git status --porcelain)"
"#;

/// The wheel is made by hand: a lab has no network.
const VENV: &str = r#"
python3 - "$local" <<'END'
import base64, hashlib, sys, zipfile
files = {
    "forebay_sample/__init__.py": "def main():\n    print('sample', 42)\n",
    "forebay_sample/data/model.bin": "x" * 100_000,
    "forebay_sample-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: forebay-sample\nVersion: 1.0\n",
    "forebay_sample-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "forebay_sample-1.0.dist-info/entry_points.txt": "[console_scripts]\nforebay-sample = forebay_sample:main\n",
}
record = ""
for name, text in files.items():
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    record += f"{name},sha256={digest},{len(text)}\n"
record += "forebay_sample-1.0.dist-info/RECORD,,\n"
with zipfile.ZipFile(f"{sys.argv[1]}/forebay_sample-1.0-py3-none-any.whl", "w") as wheel:
    for name, text in files.items():
        wheel.writestr(name, text)
    wheel.writestr("forebay_sample-1.0.dist-info/RECORD", record)
END
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# It does not show why pip cannot be installed.
python3 -m venv env || { env/bin/python -m ensurepip --default-pip; exit 1; }
test -L env/bin/python
env/bin/pip install --quiet --no-index --find-links "$local" forebay-sample
test "$(env/bin/forebay-sample)" = "sample 42"
env/bin/pip check
"#;

const VENV_CHECK: &str = r#"
test "$(env/bin/python -c 'import forebay_sample, sys; print(sys.prefix)')" = "$PWD/env"
"#;

/// The layout of huggingface_hub: blobs by their hash, snapshots of symbolic links to them, locks beside them. A download goes
/// to a file that gets its name when it is complete.
const HUB: &str = r#"
python3 - <<'END'
import fcntl, hashlib, os, random
random.seed(7)
model = "hub/models--lab--sample"
for folder in ("blobs", "refs", "snapshots/0123abcd"):
    os.makedirs(f"{model}/{folder}")
os.makedirs("hub/.locks/models--lab--sample")
os.makedirs(f"{model}/snapshots/0123abcd/vae")
for name in ("config.json", "model-00001.safetensors", "model-00002.safetensors", "vae/config.json", "copy.json"):
    content = b"{}" if name == "copy.json" else random.randbytes(200_000 if name.startswith("model") else 300)
    digest = hashlib.sha256(content).hexdigest()
    with open(f"hub/.locks/models--lab--sample/{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        blob = f"{model}/blobs/{digest}"
        with open(f"{blob}.incomplete", "ab") as file:
            for at in range(0, len(content), 10_000):
                file.write(content[at:at + 10_000])
        os.replace(f"{blob}.incomplete", blob)
        pointer = f"{model}/snapshots/0123abcd/{name}"
        target = os.path.relpath(blob, os.path.dirname(pointer))
        os.symlink(target, pointer + ".tmp")
        os.replace(pointer + ".tmp", pointer)
        assert os.readlink(pointer) == target and os.path.islink(pointer)
        assert os.path.samefile(pointer, blob)
with open(f"{model}/refs/main", "w") as file:
    file.write("0123abcd")
END
"#;

const HUB_CHECK: &str = r#"
python3 - <<'END'
import hashlib, os
model = "hub/models--lab--sample"
snapshot = f"{model}/snapshots/" + open(f"{model}/refs/main").read()
names = [os.path.join(folder, name) for folder, _, files in os.walk(snapshot) for name in files]
assert len(names) == 5, names
for name in names:
    digest = os.path.basename(os.readlink(name))
    with open(name, "rb") as file:
        assert hashlib.sha256(file.read()).hexdigest() == digest, name
assert not [name for name in os.listdir(f"{model}/blobs") if name.endswith(".incomplete")]
END
"#;

/// Checksums, extended attributes and the link of a folder, so that two folders can be compared.
macro_rules! sums {
    () => {
        r#"
sums() {
(
    cd "$1"
    find . -type f | LC_ALL=C sort | xargs sha256sum
    getfattr -R -h -d -m - . | LC_ALL=C sort
    readlink link
)
}
"#
    };
}

const TAR: &str = concat!(
    sums!(),
    r#"
mkdir source
for number in 1 2 3 4 5; do
    head -c 5000 /dev/urandom > source/$number
    setfattr -n user.number -v $number source/$number
    setfattr -n user.binary -v 0x00ff10 source/$number
done
setfattr -n user.folder -v kept source
ln -s 1 source/link
# The client caches times of a directory for a second, even if it has changed the directory itself: tar would see a change.
sleep 2
tar --xattrs -cf "$local/archive.tar" source
mkdir unpacked
tar --xattrs -xf "$local/archive.tar" -C unpacked
test "$(sums "$PWD/source")" = "$(sums "$PWD/unpacked/source")"
sums "$PWD/source" > sums
grep -q 'user.binary=' sums
# And the other way: from the volume again, without a difference.
tar --xattrs -df "$local/archive.tar"
"#
);

const TAR_CHECK: &str = concat!(
    sums!(),
    r#"
test "$(sums "$PWD/unpacked/source")" = "$(cat sums)"
"#
);

/// A process that counts, so that lost transactions are noticed: BASE OPTIONS TIMES.
macro_rules! count {
    () => {
        r#"
count() {
python3 - "$@" <<'END'
import sqlite3, sys
base = sqlite3.connect(f"file:{sys.argv[1]}.db{sys.argv[2]}", uri=True, timeout=120, isolation_level=None)
for _ in range(int(sys.argv[3])):
    base.execute("BEGIN IMMEDIATE")
    base.execute("UPDATE counter SET value = value + 1")
    base.execute("INSERT INTO rows (text) VALUES (hex(randomblob(200)))")
    base.execute("COMMIT")
END
}
create() {
python3 - "$@" <<'END'
import sqlite3, sys
mode = sys.argv[1]
base = sqlite3.connect(f"file:{mode}.db{sys.argv[2]}", uri=True, timeout=1)
found = base.execute(f"PRAGMA journal_mode = {mode}").fetchone()[0]
assert found == mode, f"journal mode {mode}: {found}"
base.execute("CREATE TABLE counter (value INTEGER)")
base.execute("CREATE TABLE rows (text TEXT)")
base.execute("INSERT INTO counter VALUES (0)")
base.commit()
END
}
verify() {
python3 - "$@" <<'END'
import sqlite3, sys
base = sqlite3.connect(f"file:{sys.argv[1]}.db{sys.argv[2]}", uri=True, timeout=120)
for query in ("SELECT value FROM counter", "SELECT count(*) FROM rows"):
    found = base.execute(query).fetchone()[0]
    assert found == int(sys.argv[3]), f"{query}: {found}"
assert base.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
END
}
"#
    };
}

/// Linux's client does not turn a process's own read lock into a write lock, which sqlite does: its default locks fail. Its lock
/// files work, on all nodes.
const SQLITE: &str = concat!(
    count!(),
    r#"
if create delete "" 2> "$local/said"; then echo "sqlite's own locks work: update docs/reference/posix.md"; exit 1; fi
grep -q 'database is locked' "$local/said"
rm -f delete.db*
files='?vfs=unix-dotfile'
for mode in delete truncate persist memory; do
    create $mode $files
    count $mode $files 20 & first=$!
    count $mode $files 20
    wait $first
    verify $mode $files 40
done
"#
);

const SQLITE_CHECK: &str = concat!(
    count!(),
    r#"
files='?vfs=unix-dotfile'
for mode in delete truncate persist memory; do
    verify $mode $files 40
    count $mode $files 5
    verify $mode $files 45
done
"#
);

/// Every journal mode, with two processes of the node.
const SQLITE_LOCAL: &str = concat!(
    count!(),
    r#"
for mode in delete truncate persist memory wal; do
    create $mode ""
    count $mode "" 20 & first=$!
    count $mode "" 20
    wait $first
    verify $mode "" 40
done
"#
);

const SQLITE_LOCAL_CHECK: &str = concat!(
    count!(),
    r#"
for mode in delete truncate persist memory wal; do verify $mode "" 40; done
"#
);

/// Attributes of the user, hard and symbolic links, modes, times. A second run must find nothing to do.
const RSYNC: &str = r#"
mkdir -p "$local/source/folder"
cd "$local/source"
for number in 1 2 3 4 5 6; do head -c 3000 /dev/urandom > folder/$number; done
chmod 600 folder/1; chmod 755 folder/2; chmod 440 folder/3
touch -d '2020-02-03 04:05:06.123456700' folder/4
setfattr -n user.origin -v https://example.org folder/5
ln folder/6 hard; ln -s folder/6 soft; ln -s /no/such/file dangling
chmod 1770 folder
cd "$OLDPWD"
rsync -aHAX "$local/source/" copy/
again=$(rsync -aHAX --delete --itemize-changes "$local/source/" copy/)
test -z "$again" || { echo "a second rsync repeats: $again"; exit 1; }
sums=$(rsync -aHAX --checksum --itemize-changes "$local/source/" copy/)
test -z "$sums" || { echo "rsync --checksum repeats: $sums"; exit 1; }
test copy/hard -ef copy/folder/6
back=$(rsync -aHAX --dry-run --delete --itemize-changes copy/ "$local/source/")
test -z "$back" || { echo "rsync from the volume finds: $back"; exit 1; }
"#;

const RSYNC_CHECK: &str = r#"
export TZ=UTC
test "$(stat -c %a copy/folder copy/folder/1 copy/folder/2 copy/folder/3 | xargs)" = "1770 600 755 440"
test "$(stat -c %y copy/folder/4)" = "2020-02-03 04:05:06.123456700 +0000"
test "$(getfattr --only-values -n user.origin copy/folder/5)" = https://example.org
test "$(stat -c %h copy/hard)" = 2
test "$(readlink copy/dangling)" = /no/such/file
cmp copy/soft copy/folder/6
"#;
