#!/usr/bin/env bash
# Builds Forebay's image as an OCI archive, without Docker, Podman or Buildah: scripts/image.sh OUT.tar [option ...]
#   --version V      tag of the image (default: the workspace's version)
#   --name NAME      name of the image (default: docker.io/forebay/forebay)
#   --binaries DIR   take the binaries from this folder (default: build them, or take them from the cache)
#   --also NAME      include this binary as well; can be repeated
#   --plain          leave the layers uncompressed: larger, but quicker to build and to import
# or an image with one static program and nothing else:
#   --static FILE    the entry point is /NAME-OF-FILE; needs --name and --version
#
#   ctr -n k8s.io images import OUT.tar    podman load -i OUT.tar    docker load -i OUT.tar
# The same inputs give the same bytes. The base (Debian of the release that the binaries were built on, and the packages of
# image/packages) is built once and cached; FOREBAY_IMAGE_REFRESH=1 rebuilds it with newer packages.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/prepare.sh
source scripts/oci.sh

usage() { sed -n '2,14s/^# \{0,1\}//p' scripts/image.sh; }
out='' version='' name=docker.io/forebay/forebay binaries='' also=() static='' suffix=.gz
while [ $# -gt 0 ]; do
    case $1 in
        --version) version=$2; shift ;;
        --name) name=$2; shift ;;
        --binaries) binaries=$2; shift ;;
        --also) also+=("$2"); shift ;;
        --plain) suffix= ;;
        --static) static=$2; shift ;;
        -h | --help) usage; exit 0 ;;
        -*) echo "image.sh: unknown option '$1'" >&2; usage >&2; exit 2 ;;
        *) out=$1 ;;
    esac
    shift
done
[ -n "$out" ] || { usage >&2; exit 2; }
case $out in /*) ;; *) out=$OLDPWD/$out ;; esac
cache=${FOREBAY_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/forebay}

# newest_glibc FILE ...: the newest version of glibc that these files refer to.
newest_glibc() { grep -aohE 'GLIBC_2\.[0-9]+' "$@" | sort -V | tail -n 1; }

# pack TAR: gzips it if requested, and prints its name.
pack() {
    [ -z "$suffix" ] || gzip -n "$1"
    echo "$1$suffix"
}

# archives RELEASE: sources for apt: this machine's own archive with its security updates, or FOREBAY_MIRROR.
archives() {
    local found
    find_archives() {
        apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
            awk -v release="$1" '$2 == "main" && ($1 == release || $1 == release "-security" || $1 == release "-updates") { print "deb", $3, $1, $2 }' | sort -u
    }
    found=$(find_archives "$1")
    # apt lists only archives that it has indexes of.
    if [ -z "$found" ] && [ "$(id -u)" -eq 0 ]; then
        apt-get update -qq >&2
        found=$(find_archives "$1")
    fi
    if grep -q " $1 main\$" <<<"$found"; then
        printf '%s\n' "$found"
    elif [ -n "${FOREBAY_MIRROR:-}" ]; then
        printf 'deb %s %s main\n' "$FOREBAY_MIRROR" "$1"
    else
        echo "image.sh: apt here knows no archive of Debian $1: set FOREBAY_MIRROR to the address of one" >&2
        return 1
    fi
}

# Sets BASE to the base's layer.
prepare_base() {
    local release key work sources script
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    # Binaries need the C library that they were built with, or a newer one.
    case $release in bookworm | trixie) ;; *) release=trixie ;; esac
    script=$(cat image/base.sh)
    key=$(printf '%s\n' "$release" "$(cat image/packages)" "$script" "layout 2" | sha256sum | cut -c1-20)
    work=$cache/image-base
    mkdir -p "$work"
    exec 9>"$work/$key.lock"
    flock 9
    BASE=$work/$key/base.tar$suffix
    if [ -e "$BASE" ] && [ -z "${FOREBAY_IMAGE_REFRESH:-}" ]; then
        return 0
    fi
    need_packages mmdebstrap debian-archive-keyring
    sources=$(archives "$release")
    echo "making the image's base (Debian $release; a minute, once)"
    rm -rf "$work/.$key"
    mkdir "$work/.$key"
    # The hook is a file: mmdebstrap runs it while it builds the tree, in a user namespace if necessary.
    printf '%s\n' "$script" >"$work/.$key/base.sh"
    SOURCE_DATE_EPOCH=0 mmdebstrap --variant=minbase --quiet --skip=output/dev \
        --keyring=/usr/share/keyrings/debian-archive-keyring.gpg \
        --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --dpkgopt=force-unsafe-io \
        --include="$(grep -v '^#' image/packages | paste -sd,)" \
        --customize-hook="sh $work/.$key/base.sh \"\$1\"" \
        "$release" "$work/.$key/base.tar" - <<<"$sources"
    gzip -nk "$work/.$key/base.tar"
    rm -rf "${work:?}/$key"
    mv "$work/.$key" "$work/$key"
}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ -n "$static" ]; then
    [ -n "$version" ] || { echo "image.sh: --static needs --name and --version" >&2; exit 2; }
    program=$(basename "$static")
    install -D -m 755 "$static" "$scratch/root/$program"
    tar_layer "$scratch/layer.tar" "$scratch/root"
    oci_write "$out" "$name:$version" "\"Entrypoint\":[\"/$program\"],\"User\":\"65532:65532\"" "$(pack "$scratch/layer.tar")"
    echo "$out: $name:$version"
    exit 0
fi

if [ -z "$version" ]; then
    version=$(sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
fi
if [ -z "$binaries" ]; then
    prepare_toolchain
    prepare_binaries
    binaries=$BINARIES
fi
need_packages binutils
prepare_base
mkdir -p "$scratch/root/usr/local/bin"
for program in $(grep -v '^#' image/binaries) "${also[@]}"; do
    [ -e "$binaries/$program" ] || { echo "image.sh: $binaries has no $program" >&2; exit 1; }
    # Nine tenths of their size is debug information.
    strip --strip-debug -o "$scratch/root/usr/local/bin/$program" "$binaries/$program"
    chmod 755 "$scratch/root/usr/local/bin/$program"
done
have=$(gzip -dcf "$BASE" | tar --extract --wildcards --to-stdout './lib/*/libc.so.6' './usr/lib/*/libc.so.6' 2>/dev/null | newest_glibc - || true)
want=$(newest_glibc "$scratch"/root/usr/local/bin/*)
if [ "$(printf '%s\n' "$have" "$want" | sort -V | tail -n 1)" != "$have" ]; then
    echo "image.sh: the binaries need $want, the base has ${have:-no C library}" >&2
    exit 1
fi
tar_layer "$scratch/layer.tar" "$scratch/root"
title="\"org.opencontainers.image.title\":\"Forebay\",\"org.opencontainers.image.version\":\"$version\",\"org.opencontainers.image.licenses\":\"Apache-2.0\""
oci_write "$out" "$name:$version" \
    "\"Env\":[\"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\"],\"Cmd\":[\"forebay-server\",\"run\"],\"Labels\":{$title}" \
    "$BASE" "$(pack "$scratch/layer.tar")"
echo "$out: $name:$version, $(($(stat -c %s "$out") >> 20)) MiB"
