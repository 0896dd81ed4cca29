# Sourced: writes OCI image archives with only coreutils and tar. The output depends only on the input, byte by byte.

# tar_layer OUT FOLDER: the contents of the folder, owned by root, independent of time and place.
tar_layer() {
    local entries
    entries=$(cd "$2" && LC_ALL=C ls)
    # shellcheck disable=SC2086 # names without spaces, all of them ours
    tar --create --file "$1" --directory "$2" --format=gnu --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner $entries
}

# oci_write OUT REFERENCE CONFIG LAYER...: an archive that `ctr images import`, `podman load` and `docker load` accept.
# REFERENCE is the full name with its tag; CONFIG the members of the image's "config" object, as JSON; each LAYER a tar, gzipped
# if its name ends in .gz.
oci_write() {
    local out=$1 reference=$2 config=$3 work layer digest plain size kind architecture layers='' diffs='' files=''
    shift 3
    case $(uname -m) in
        x86_64) architecture=amd64 ;;
        aarch64) architecture=arm64 ;;
        *) architecture=$(uname -m) ;;
    esac
    work=$(mktemp -d "$out.XXXXXX")
    mkdir -p "$work/blobs/sha256"
    for layer in "$@"; do
        digest=$(sha256sum <"$layer" | cut -c1-64)
        size=$(stat -Lc %s "$layer")
        case $layer in
            *.gz) kind=tar+gzip plain=$(gzip -dc "$layer" | sha256sum | cut -c1-64) ;;
            *) kind=tar plain=$digest ;;
        esac
        cp "$layer" "$work/blobs/sha256/$digest"
        layers+="${layers:+,}{\"mediaType\":\"application/vnd.oci.image.layer.v1.$kind\",\"digest\":\"sha256:$digest\",\"size\":$size}"
        diffs+="${diffs:+,}\"sha256:$plain\""
        files+="${files:+,}\"blobs/sha256/$digest\""
    done
    local config_blob manifest
    config_blob=$(oci_blob "$work" "{\"created\":\"1970-01-01T00:00:00Z\",\"architecture\":\"$architecture\",\"os\":\"linux\",\"config\":{$config},\"rootfs\":{\"type\":\"layers\",\"diff_ids\":[$diffs]}}")
    manifest=$(oci_blob "$work" "{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",\"config\":{\"mediaType\":\"application/vnd.oci.image.config.v1+json\",$config_blob},\"layers\":[$layers]}")
    printf '{"imageLayoutVersion":"1.0.0"}' >"$work/oci-layout"
    printf '%s' "{\"schemaVersion\":2,\"mediaType\":\"application/vnd.oci.image.index.v1+json\",\"manifests\":[{\"mediaType\":\"application/vnd.oci.image.manifest.v1+json\",$manifest,\"annotations\":{\"io.containerd.image.name\":\"$reference\",\"org.opencontainers.image.ref.name\":\"${reference##*:}\"},\"platform\":{\"architecture\":\"$architecture\",\"os\":\"linux\"}}]}" >"$work/index.json"
    # Docker before 25 reads only this.
    config_blob=${config_blob#*sha256:}
    printf '%s' "[{\"Config\":\"blobs/sha256/${config_blob%%\"*}\",\"RepoTags\":[\"$reference\"],\"Layers\":[$files]}]" >"$work/manifest.json"
    tar_layer "$out.tmp" "$work"
    rm -rf "$work"
    mv "$out.tmp" "$out"
}

# Stores a blob and prints its digest and size as members of a descriptor.
oci_blob() { # WORK TEXT
    local digest
    digest=$(printf '%s' "$2" | sha256sum | cut -c1-64)
    printf '%s' "$2" >"$1/blobs/sha256/$digest"
    printf '"digest":"sha256:%s","size":%s' "$digest" "$(printf '%s' "$2" | wc -c)"
}
