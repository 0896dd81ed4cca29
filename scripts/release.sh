#!/usr/bin/env bash
# Builds the files of a release, for the architecture of this machine: scripts/release.sh [option ...]
#   --out DIR        output folder (default: target/release-VERSION)
#   --binaries DIR   take the binaries from this folder (default: build them, or take them from the cache)
#   --helm PROGRAM   Helm 3.8 or newer (default: helm in the PATH)
#   --dry-run        check the tree, and print what would be built and published; builds, writes and downloads nothing
#
# It builds:
#   forebay-VERSION-linux-ARCH.tar                  the image, an OCI archive (scripts/image.sh)
#   forebay-VERSION.tgz                             the chart, as `helm push` takes it
#   kubectl-forebay-VERSION-linux-ARCH.tar.gz       the kubectl plugin, with the licence
#   forebay-VERSION-linux-ARCH.cdx.json             SBOM (CycloneDX 1.5): crates of Cargo.lock, Debian packages of the image
#   SHA256SUMS                                      checksums of all of these
# and prints the commands that publish them. It publishes and signs nothing itself.
# A release needs a clean tree, one version in Cargo.toml and the chart, and a dated section of it in CHANGELOG.md; the dry run
# reports what is missing and continues.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/prepare.sh

usage() { sed -n '2,17s/^# \{0,1\}//p' scripts/release.sh; }
out='' binaries='' helm=helm dry_run=
while [ $# -gt 0 ]; do
    case $1 in
        --out | --binaries | --helm)
            [ $# -ge 2 ] || { echo "release.sh: $1 needs a value" >&2; exit 2; }
            case $1 in --out) out=$2 ;; --binaries) binaries=$2 ;; --helm) helm=$2 ;; esac
            shift ;;
        --dry-run) dry_run=yes ;;
        -h | --help) usage; exit 0 ;;
        *) echo "release.sh: unknown argument '$1'" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
# Paths are relative to the caller's folder.
for name in out binaries; do
    case ${!name} in '' | /*) ;; *) printf -v "$name" '%s/%s' "$OLDPWD" "${!name}" ;; esac
done

version=$(sed -n '/^\[workspace\.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
case $(uname -m) in x86_64) architecture=amd64 ;; aarch64) architecture=arm64 ;; *) architecture=$(uname -m) ;; esac
out=${out:-$PWD/target/release-$version}
image=forebay-$version-linux-$architecture.tar
chart=forebay-$version.tgz
plugin=kubectl-forebay-$version-linux-$architecture.tar.gz
sbom=forebay-$version-linux-$architecture.cdx.json

problems=0
problem() { echo "release.sh: $*" >&2; problems=$((problems + 1)); }
check() {
    local field
    for field in version appVersion; do
        [ "$(sed -n "s/^$field: \"\{0,1\}\([^\"]*\)\"\{0,1\}\$/\1/p" charts/forebay/Chart.yaml)" = "$version" ] ||
            problem "$field in charts/forebay/Chart.yaml is not $version"
    done
    grep -qE "^## ${version//./\\.} - [0-9]{4}-[0-9]{2}-[0-9]{2}\$" CHANGELOG.md ||
        problem "CHANGELOG.md has no section '## $version - YYYY-MM-DD'"
    [ -z "$(git status --porcelain)" ] || problem "the tree has changes that are not committed"
    [ "$(git rev-parse -q --verify "v$version^{commit}" || true)" = "$(git rev-parse HEAD)" ] ||
        problem "the tag v$version is not this commit"
    command -v "$helm" >/dev/null || problem "no Helm: '$helm' is no program; --helm names one"
    command -v python3 >/dev/null || problem "no python3, which writes the SBOM"
}

publishing() {
    cat <<EOF
to publish, from $out, with REGISTRY the address of your registry:
  sha256sum -c SHA256SUMS
  skopeo copy oci-archive:$image docker://REGISTRY/forebay:$version
  helm push $chart oci://REGISTRY/charts
  and upload $plugin, $sbom and SHA256SUMS with the release v$version
EOF
}

check
if [ -n "$dry_run" ]; then
    echo "would make in $out, from ${binaries:-a build by the profile dist}:"
    printf '  %s\n' "$image" "$chart" "$plugin" "$sbom" SHA256SUMS
    publishing
    echo "$problems problem(s)"
    exit 0
fi
[ "$problems" -eq 0 ] || exit 1

if [ -z "$binaries" ]; then
    prepare_toolchain
    # Optimized across crates: slower to build, faster to run (Cargo.toml).
    FOREBAY_PROFILE=${FOREBAY_PROFILE:-dist} prepare_binaries
    binaries=$BINARIES
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
rm -rf "$out"
mkdir -p "$out"

scripts/image.sh "$out/$image" --binaries "$binaries"
"$helm" package charts/forebay --destination "$out" >/dev/null
strip --strip-debug -o "$scratch/kubectl-forebay" "$binaries/kubectl-forebay"
cp LICENSE "$scratch/"
tar --create --file - --directory "$scratch" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner --mode=a+rX,u+w,go-w \
    LICENSE kubectl-forebay | gzip -n >"$out/$plugin"
scripts/sbom.py "$version" "$out/$image" >"$out/$sbom"
(cd "$out" && sha256sum "$image" "$chart" "$plugin" "$sbom" >SHA256SUMS)
ls -l "$out"
publishing
