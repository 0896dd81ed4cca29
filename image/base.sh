#!/bin/sh
# What the image's base is beyond its packages; its argument is the root file system. Both ways of making the image use it.
set -eu
root=${1:?the root file system}

# Pods that need no more run as this user (the number is what `runAsNonRoot` looks at).
if ! grep -q '^forebay:' "$root/etc/passwd"; then
    echo 'forebay:x:65532:65532:Forebay:/nonexistent:/usr/sbin/nologin' >>"$root/etc/passwd"
    echo 'forebay:x:65532:' >>"$root/etc/group"
    echo 'forebay:!::0:99999:7:::' >>"$root/etc/shadow"
fi

# Places that are mounted over where the root file system is read-only.
mkdir -p "$root/etc/forebay" "$root/var/lib/forebay"

# In a container that is being built these are mounted over.
rm -f "$root/etc/hostname" "$root/etc/resolv.conf" 2>/dev/null || true

# Caches and logs: of no use, and different each time.
rm -rf "$root"/var/lib/apt/lists/* "$root"/var/cache/apt/* "$root"/var/cache/debconf/*-old "$root"/var/cache/ldconfig/* \
    "$root"/var/log/* "$root"/var/lib/dpkg/*-old "$root"/usr/share/doc-base "$root"/usr/share/info "$root"/tmp/* "$root"/etc/*-
# Written by the installation with times in them; Python makes them again where it may.
find "$root/usr" -name __pycache__ -prune -exec rm -rf {} +
# The archive of the machine that made it means nothing elsewhere.
[ ! -e "$root/etc/apt/sources.list.d/0000stdin.list" ] || rm "$root/etc/apt/sources.list.d/0000stdin.list"
rm -f "$root/etc/apt/sources.list"
: >"$root/etc/machine-id"
